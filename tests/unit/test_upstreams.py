"""Names of engines: accepted forms, and refused ones with their errors."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from slotkeeper.addresses import MAX_ENGINES, NamedUpstream, UpstreamsError, read_table
from slotkeeper.settings import Settings

ONE, OTHER = "http://10.0.0.1:8081", "http://10.0.0.2:8081"


@pytest.mark.parametrize(
    ("text", "name", "base"),
    [
        (f"cuda={ONE}", "cuda", ONE),
        (f" ryzen.ai-max_2 = {ONE}/v1/ ", "ryzen.ai-max_2", ONE),
        (ONE, ONE, ONE),
        (f"{ONE}/a=b", f"{ONE}/a=b", f"{ONE}/a=b"),  # no name: it has a colon
    ],
)
def test_an_upstream_may_have_a_name_before_its_address(text, name, base):
    found = NamedUpstream.parse(text)
    assert (found.name, found.base) == (name, base)
    assert NamedUpstream.parse(str(found)) == found


@pytest.mark.parametrize(
    "text", ["cuda=", "cuda=10.0.0.1", "=http://a:1", "-x=http://a:1", f"{'n' * 41}={ONE}"]
)
def test_an_invalid_address_is_refused(text):
    with pytest.raises(ValueError, match="is not a URL"):
        NamedUpstream.parse(text)


def test_a_table_has_names_addresses_and_labels(tmp_path):
    path = tmp_path / "engines.toml"
    path.write_text(f'[cuda]\nurl = "{ONE}/v1"\nlabels = {{card = "4090"}}\n[ryzen]\nurl = "{OTHER}"\n')
    cuda, ryzen = read_table(path)
    assert cuda == NamedUpstream("cuda", ONE, (("card", "4090"),))
    assert ryzen == NamedUpstream("ryzen", OTHER)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("", "at least one"),
        ("[a", "is not valid TOML"),
        ("a = 1", "a is not a table"),
        ('["a b"]\nurl = "http://a:1"', "is not a valid name"),
        ("[a]\nurl = 1", "a.url"),
        ('[a]\nurl = "a:1"', "a.url: 'a:1' is not a URL"),
        ('[a]\nurl = "http://a:1"\nport = 1', "a.port"),
        ('[a]\nurl = "http://a:1"\nlabels = {n = 1}', "a.labels.n"),
        ('[a]\nurl = "http://a:1"\n[b]\nurl = "http://a:1"', "only once"),
        ("#" * (2**20 + 1), "larger than 1 MiB"),
    ],
)
def test_an_invalid_table_is_refused_with_a_reason(tmp_path, text, message):
    path = tmp_path / "engines.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UpstreamsError, match=message):
        read_table(path)


def test_more_engines_than_one_sidecar_serves_are_refused_with_the_page_that_says_what_to_do():
    def named(count: int) -> tuple[str, ...]:
        return tuple(f"http://10.0.0.{number}:8080" for number in range(count))

    assert len(Settings(upstream=named(MAX_ENGINES)).engines()) == MAX_ENGINES
    with pytest.raises(ValidationError, match=r"at most 8 engines, not 9.*slotkeeper docs scaling"):
        Settings(upstream=named(MAX_ENGINES + 1))


def test_with_a_table_only_explicitly_given_engines_are_added_to_it(tmp_path):
    path = tmp_path / "engines.toml"
    path.write_text(f'[cuda]\nurl = "{ONE}"\n')
    assert [one.name for one in Settings(upstreams_file=path).engines()] == ["cuda"]
    both = Settings(upstreams_file=path, upstream=(f"ryzen={OTHER}",))
    assert [one.name for one in both.engines()] == ["ryzen", "cuda"]
    for twice, said in ((ONE, "only once"), (f"cuda={OTHER}", "one name")):
        with pytest.raises(UpstreamsError, match=said):
            Settings(upstreams_file=path, upstream=(twice,)).engines()
