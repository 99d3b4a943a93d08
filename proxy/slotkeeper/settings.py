"""All settings with their defaults, the checks of their values, and the sources that they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import (
    ByteSize,
    Discriminator,
    Field,
    SecretStr,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from slotkeeper.addresses import AUTO, NamedUpstream, checked, read_table
from slotkeeper.conversation.rules.base import Setting
from slotkeeper.environment import PREFIX, SECRETS, USUAL_ADMIN_LISTEN, check_names, secret_files
from slotkeeper.scheduler.snapshots.budgets import Limits
from slotkeeper.values import PLAIN, Address, UsageError, host_name, meant, network, removed

BODIES_AT_ONCE: Final = 8  # of the largest size, in memory
ALL_BODIES_BYTES: Final = 512 * 2**20  # the least room for all of them together
LIMITS: Final = Limits()  # the usual ones

# A size, or "auto". It is decided before either is checked, so that a bad size has one error.
BudgetSize = Annotated[
    Annotated[Literal["auto"], Tag("auto")] | Annotated[ByteSize, Field(ge=0), Tag("size")],
    Discriminator(lambda value: "auto" if value == "auto" else "size"),
]


class Settings(BaseSettings):
    """All settings of `serve`."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix=PREFIX, arbitrary_types_allowed=True
    )

    # -- basics: on the first page of --help
    upstream: Annotated[tuple[str, ...], NoDecode] = Field(
        default=("http://127.0.0.1:8081",),
        description=(
            "URL of a llama-server, with any --api-prefix, or NAME=URL; several for engines with the "
            "same model; auto: the one of this machine"
        ),
    )
    listen: str = Field(default="127.0.0.1:8080", description="where clients connect, HOST:PORT")
    admin_listen: str = Field(default=USUAL_ADMIN_LISTEN, description="metrics, probes and state, HOST:PORT")
    slot_dir: Path | None = Field(
        default=None,
        description="folder for snapshots: the engine's --slot-save-path, as this machine sees it",
    )
    engine_api_key: SecretStr | None = Field(
        default=None, description="the engine's --api-key, for our own control calls"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="debug, info, warning or error"
    )

    # -- engines
    upstreams_file: Path | None = Field(
        default=None,
        description=(
            "TOML file with a table for each further engine (`slotkeeper docs engines`); read again at SIGHUP"
        ),
    )
    engine_wait: float = Field(
        default=LIMITS.engine_wait,
        ge=0,
        description=(
            "seconds that requests wait for an engine that loads, is probed, or ended; 0: an error at once"
        ),
    )

    max_running: int = Field(
        default=LIMITS.running,
        ge=0,
        description=(
            "requests at work on one engine at once: with more slots than that, the others keep their "
            "contexts meanwhile; 0: one for each slot"
        ),
    )
    max_delay_factor: float = Field(
        default=LIMITS.delay_factor,
        ge=1,
        description=(
            "times as long as in the order of arrival that a request may wait for its first token, while "
            "cheaper ones go first and slots are kept for agents whose tools return soon; 1: that order"
        ),
    )

    # -- snapshots and idle work
    cold_dir: Path | None = Field(
        default=None,
        description="second, larger or slower folder for snapshots",
    )
    hot_bytes: BudgetSize = Field(
        default="auto",
        description="room for snapshots in the slot folder; auto: a part of what is free there",
    )
    cold_bytes: BudgetSize = Field(default="auto", description="the same for the cold folder")
    hourly_bytes: BudgetSize = Field(
        default="auto",
        description=(
            "bytes that may be written in an hour for paused conversations and shared beginnings, "
            "because disks wear out; auto: by the disk's size"
        ),
    )
    shared_slot_dir: bool = Field(
        default=False,
        description=(
            "allow the slot and the cold folder to be writable for a group or for all, like volumes "
            "of a pod (`slotkeeper docs security`)"
        ),
    )
    evacuate: bool = Field(
        default=False,
        description="when the sidecar stops, move all snapshots to the cold folder or shared store",
    )
    idle_tokens: int = Field(
        default=LIMITS.idle_tokens,
        ge=0,
        description="prompt tokens that may be computed per hour in idle time (prefetch); 0: off",
    )

    # -- a store that several sidecars share
    cold_store: str = Field(
        default="",
        description=(
            "instead of a cold folder: s3://BUCKET/PREFIX, or a folder that all see (`slotkeeper docs "
            "shared-store`); needs the extra `s3`"
        ),
    )
    cold_store_bytes: ByteSize = Field(
        default=ByteSize(512 * 2**30),
        ge=0,
        description="room in the shared store, for all sidecars; 0: no limit",
    )
    store_key_file: Path | None = Field(
        default=None,
        description=(
            "file with a secret of 32 bytes or more, which encrypts the store; the same for all sidecars"
        ),
    )
    hints: SecretStr | None = Field(
        default=None,
        description=(
            "redis://HOST:6379/0: a Redis or Valkey that makes lookups faster; needs the extra `hints`"
        ),
    )

    # -- clients
    rules: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description=(
            "clients that rewrite their own prompts: NAME=off|observe|fix, optionally with @ and a "
            "pattern for the User-Agent (`slotkeeper docs rules`)"
        ),
    )
    keep_alive: float = Field(
        default=10.0,
        ge=0,
        description=(
            "seconds of silence after which a waiting stream gets an SSE comment; 0: none (`slotkeeper docs "
            "agents`)"
        ),
    )
    namespaces: Literal["auto", "key", "off"] = Field(
        default="auto",
        description=(
            "key: tokens computed for one API key are never reused for another; off: all keys share a "
            "cache; auto: key once there are two (`slotkeeper docs security`)"
        ),
    )
    max_body_bytes: ByteSize = Field(
        default=ByteSize(64 * 2**20), gt=0, description="larger request bodies are refused with 413"
    )
    max_connections: int = Field(
        default=8192,
        ge=1,
        description="client connections on the data port, if there are enough file descriptors",
    )
    trusted_proxies: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description=(
            "proxies in front, ADDRESS or NETWORK/BITS, whose X-Forwarded-For distinguishes clients without "
            "keys"
        ),
    )

    # -- keys and TLS
    keys_file: Path | None = Field(
        default=None,
        description=(
            "serve only clients with a key of this TOML file (`slotkeeper docs security`); read again at "
            "SIGHUP"
        ),
    )
    tls_cert: Path | None = Field(
        default=None,
        description=(
            "TLS on both ports, with this certificate and its intermediates (PEM); read again at SIGHUP"
        ),
    )
    tls_key: Path | None = Field(
        default=None, description="key of the certificate (PEM), if the certificate's file does not have it"
    )
    admin_token: SecretStr | None = Field(
        default=None, description="bearer token of the admin port; needed unless it listens on loopback"
    )
    admin_host: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="names under which the admin port may be called, besides localhost and IP addresses",
    )

    # -- shutdown
    drain_delay: float = Field(
        default=2.0,
        ge=0,
        description="seconds from SIGTERM (readyz turns 503) until new connections are refused",
    )
    drain_timeout: float = Field(
        default=300.0, ge=0, description="seconds that running answers get to finish after that"
    )
    save_timeout: float = Field(
        default=60.0, ge=0, description="seconds that saving and moving may take when the sidecar stops"
    )

    # -- explanations, recordings and spans
    why_text: bool = Field(
        default=False,
        description="show excerpts of prompts where they diverge on the admin port; they stay in memory",
    )
    record: Path | None = Field(
        default=None,
        description=(
            "write every request to files in this folder: whole prompts, without credentials "
            "(`slotkeeper docs recording`)"
        ),
    )
    otlp_endpoint: str = Field(
        default="",
        description=(
            "send a span for each request to this OpenTelemetry collector, http://HOST:4318; needs the extra "
            "`otel`"
        ),
    )

    # One value of each of these is right everywhere, so none is a setting. Tests override them in a subclass.
    probe: ClassVar[bool] = True  # test an unused engine whose flags cannot be read with 32 to 86 tokens
    read_flags: ClassVar[bool] = True  # read an engine's flags from /proc, if it runs here as the same user
    engine_frozen_after: ClassVar[float] = 30.0  # seconds without any answer, not even to GET /health
    swap_wait: ClassVar[float] = LIMITS.swap_wait
    save_pause: ClassVar[float] = LIMITS.pause
    max_waiting: ClassVar[int] = LIMITS.waiting  # more get 429
    max_waiting_per_client: ClassVar[int] = LIMITS.waiting_of_one  # one client: one key, else one address
    head_timeout: ClassVar[float] = 20.0  # seconds in which a new connection must send a request's head
    body_timeout: ClassVar[float] = 30.0  # seconds for a request's body, and one more for each 16 KiB of it
    write_timeout: ClassVar[float] = 30.0  # seconds without reading after which a client is cut off
    read_ahead_bytes: ClassVar[int] = 4 * 2**20  # of one answer that its client has not read yet
    read_ahead_total: ClassVar[int] = 256 * 2**20  # the same for all answers together
    record_bytes: ClassVar[int] = 2**30  # of trace files; the oldest are removed first
    why_requests: ClassVar[int] = 500  # the last requests that `slotkeeper why` and the dashboard explain

    @field_validator("upstream", "rules", "admin_host", "trusted_proxies", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return [part.strip() for part in value.split(",")] if isinstance(value, str) else value

    @field_validator("upstream")
    @classmethod
    def _urls(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if value == (AUTO,):
            return value
        return tuple(map(str, checked(NamedUpstream.parse(text) for text in value if text)))

    @field_validator("rules")
    @classmethod
    def _rules(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            Setting.parse(text)
        return value

    @field_validator("admin_host")
    @classmethod
    def _hosts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(host_name, value))

    @field_validator("trusted_proxies")
    @classmethod
    def _networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(network, value))

    @field_validator("listen", "admin_listen")
    @classmethod
    def _address(cls, value: str) -> str:
        return str(Address.parse(value))

    @field_validator("otlp_endpoint")
    @classmethod
    def _collector(cls, value: str) -> str:
        if value and not value.startswith(("http://", "https://")):
            raise ValueError(f"{value!r} is not a URL; write http://HOST:4318")
        return value.rstrip("/")

    @field_validator(*SECRETS)
    @classmethod
    def _unset(cls, value: SecretStr | None) -> SecretStr | None:
        return value if value and value.get_secret_value() else None  # an empty variable sets no secret

    @model_validator(mode="after")
    def _guarded(self) -> Settings:
        if not Address.parse(self.admin_listen).loopback and self.admin_token is None:
            raise ValueError(
                "the admin port is reachable from outside: set --admin-token, or listen on 127.0.0.1"
            )
        return self

    @property
    def searches(self) -> bool:
        """Whether the engine is to be found on this machine: `found_at` then says where it is."""
        return self.upstream == (AUTO,)

    def found_at(self, base: str) -> Settings:
        """Return the settings with the address that was found."""
        return self.model_copy(update={"upstream": (base,)})

    def engines(self) -> tuple[NamedUpstream, ...]:
        """Return all named engines, reading the file anew. With a file, the default address is not used.

        Raises UpstreamsError.
        """
        given = self.upstream if "upstream" in self.model_fields_set or not self.upstreams_file else ()
        listed = read_table(self.upstreams_file) if self.upstreams_file else ()
        return checked((*map(NamedUpstream.parse, given), *listed))

    @property
    def all_bodies_bytes(self) -> int:
        """Room for the bodies of all requests that are being read or answered; more get 429."""
        return max(ALL_BODIES_BYTES, BODIES_AT_ONCE * self.max_body_bytes)

    @property
    def max_connections_per_address(self) -> int:
        """Of the client connections, those from one address (one /64 of IPv6)."""
        return max(1, self.max_connections // 2)

    @property
    def scheme(self) -> str:
        """The scheme of both ports' URLs."""
        return "https" if self.tls_cert else "http"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)  # `load` merges the other sources itself, to know where each value came from


BASICS: Final = "basics"  # on the first page of --help
GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    BASICS: (
        "upstream",
        "listen",
        "admin_listen",
        "slot_dir",
        "engine_api_key",
        "log_level",
    ),
    "engines": (
        "upstreams_file",
        "engine_wait",
        "max_running",
        "max_delay_factor",
    ),
    "snapshots and idle work": (
        "cold_dir",
        "hot_bytes",
        "cold_bytes",
        "hourly_bytes",
        "shared_slot_dir",
        "evacuate",
        "idle_tokens",
    ),
    "a store that several sidecars share": (
        "cold_store",
        "cold_store_bytes",
        "store_key_file",
        "hints",
    ),
    "clients": (
        "rules",
        "keep_alive",
        "namespaces",
        "max_body_bytes",
        "max_connections",
        "trusted_proxies",
    ),
    "keys and TLS": (
        "keys_file",
        "tls_cert",
        "tls_key",
        "admin_token",
        "admin_host",
    ),
    "shutdown": (
        "drain_delay",
        "drain_timeout",
        "save_timeout",
    ),
    "explanations, recordings and spans": (
        "why_text",
        "record",
        "otlp_endpoint",
    ),
}


# -- sources: flag > environment (`SLOTKEEPER_*`, secrets also `*_FILE`) > TOML > default ----------------


@dataclass(frozen=True, slots=True)
class Loaded:
    """The settings, and the source of each value."""

    settings: Settings
    origins: Mapping[str, str]  # name -> flag, environment, file PATH or default


def load(flags: Mapping[str, Any], config: Path | None = None) -> Loaded:
    """Merge all sources. Raises UsageError with one line for each error."""
    check_names(Settings.model_fields)
    sources: list[tuple[str, Mapping[str, Any]]] = [("default", {})]
    origins = dict.fromkeys(Settings.model_fields, "default")
    try:
        if config is not None:
            sources.append((f"file {config}", _file(config)))
        sources.append(
            ("environment", {**secret_files(), **EnvSettingsSource(Settings, env_prefix=PREFIX)()})
        )
        sources.append(("flag", flags))
        merged: dict[str, Any] = {}
        for origin, values in sources:
            merged |= values
            origins |= dict.fromkeys(values, origin)
        return Loaded(Settings(**merged), origins)
    except ValidationError as error:
        raise UsageError("\n".join(_line(e, origins) for e in error.errors())) from None
    except ValueError as error:  # TOML that does not parse
        raise UsageError(f"{config}: {error}") from None


def _file(path: Path) -> Mapping[str, Any]:
    """Return the settings in a TOML file. Raises ValueError if it is not TOML, UsageError if unreadable."""
    try:
        if not path.is_file():
            raise UsageError(f"--config: there is no file {path}")
        return TomlConfigSettingsSource(Settings, path)()
    except OSError as error:
        raise UsageError(
            f"--config: {path}: {error.strerror or error}; give a file that this user can read"
        ) from None


def _line(error: Any, origins: Mapping[str, str]) -> str:
    name = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":  # only a file can name a setting that does not exist
        hint = removed(name) or meant(name.replace("-", "_").lower(), Settings.model_fields)
        return f"{_named(name, origins)}: there is no such setting{hint or '; --print-config lists them'}"
    problem = PLAIN.get(error["type"], error["msg"].removeprefix("Value error, "))
    if error["type"] in PLAIN:
        problem = f"{error['input']!r} {problem}"
    return f"{_named(error['loc'][0], origins)}: {problem}" if name else problem


def _named(setting: str, origins: Mapping[str, str]) -> str:
    """Return the name of a setting in the source of its value: a variable, a file's key or a flag."""
    origin = origins.get(setting, "")
    if origin == "environment":
        return f"{PREFIX}{setting.upper()}"
    if origin.startswith("file "):
        return f"{origin.removeprefix('file ')}: {setting}"
    return f"--{setting.replace('_', '-')}"


def shown(loaded: Loaded) -> list[tuple[str, str, str]]:
    """Return (name, value, origin) of every setting, with secrets hidden, for `--print-config`."""
    return [
        (name, in_words(getattr(loaded.settings, name)), loaded.origins[name])
        for name in Settings.model_fields
    ]


def in_words(value: Any) -> str:
    """Format a value as a person would write it in a setting; "" for None."""
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case ByteSize():
            return _size(value)
        case tuple():
            return ", ".join(value)
        case _:
            return str(value)


_UNITS: Final = {
    f"{prefix}{tail}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for tail, base in (("iB", 1024), ("B", 1000))
}


def _size(count: int) -> str:
    """Format bytes in the unit that gives the shortest exact text: it parses back to the same number."""
    exact = [f"{count // unit}{name}" for name, unit in _UNITS.items() if count and not count % unit]
    return min([*exact, str(count)], key=len)
