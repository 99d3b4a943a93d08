"""Names of adapter sets, and the spaces of prompts that they separate."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotkeeper.scheduler.policies.adapters import (
    BASE,
    Adapter,
    namespace_in,
    scales_of,
    set_in,
    set_of,
    single,
    space_of,
)

TWO = (Adapter("aa", 1.0), Adapter("bb", 0.0))


@pytest.mark.parametrize(
    ("adapters", "asked", "name"),
    [
        ((), None, ""),
        ((), ((0, 1.0),), ""),
        (TWO, None, "aa*1"),
        (TWO, ((0, 1.0),), "aa*1"),
        (TWO, ((1, 0.5),), "bb*0.5"),  # a request that names one adapter sets the others to 0
        (TWO, ((0, 2.0), (1, 1.0)), "aa*2,bb*1"),
        (TWO, ((0, 0.0),), BASE),
        (TWO, ((5, 1.0),), BASE),
        (TWO, ((-1, 1.0),), BASE),
        (TWO[::-1], ((0, 1.0), (1, 2.0)), "aa*2,bb*1"),  # another engine, with the same files
    ],
)
def test_the_order_of_adapters_does_not_change_the_name_of_their_set(adapters, asked, name):
    assert set_of(adapters, asked) == name


def test_a_scale_is_compared_as_the_float_of_the_engine():
    """GET /lora-adapters shows 0.1 as 0.10000000149011612."""
    assert set_of(TWO, ((0, 0.1),)) == set_of((Adapter("aa", 0.10000000149011612), TWO[1]))
    assert set_of(TWO, ((0, 0.1),)) != set_of(TWO, ((0, 0.1000001),))
    assert set_of(TWO, ((0, 1e300),)) == "aa*inf"


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=2, max_size=2))
def test_the_name_of_an_adapter_set_gives_the_scales_to_request(scales):
    name = set_of(TWO, tuple(enumerate(scales)))
    asked = scales_of(TWO, name)
    assert set_of(TWO, asked) == name
    assert [single(scale) for _, scale in asked] == scales


def test_the_same_file_twice_is_two_adapters():
    twice = (Adapter("aa", 0.0), Adapter("aa", 0.0))
    name = set_of(twice, ((0, 1.0), (1, 2.0)))
    assert sorted(scale for _, scale in scales_of(twice, name)) == [1.0, 2.0]


def test_an_adapter_set_of_another_engine_cannot_be_requested():
    with pytest.raises(ValueError, match="no adapter cc"):
        scales_of(TWO, "cc*1")


@pytest.mark.parametrize("namespace", ["", "anna"])
@pytest.mark.parametrize("adapters", ["", BASE, "aa*1,bb*0.5"])
def test_a_space_combines_a_namespace_and_an_adapter_set(namespace, adapters):
    space = space_of(namespace, adapters)
    assert (namespace_in(space), set_in(space)) == (namespace, adapters)


def test_without_adapters_a_space_is_the_namespace_alone():
    """Snapshots of earlier releases are found under this name."""
    assert (space_of("", ""), space_of("anna", "")) == ("", "anna")
