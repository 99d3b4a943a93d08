"""All settings with their defaults, and the checks of their values."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ByteSize, Discriminator, Field, SecretStr, Tag, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from slotkeeper.conversation.rules.base import Setting
from slotkeeper.environment import PREFIX, SECRETS, USUAL_ADMIN_LISTEN
from slotkeeper.upstreams import NamedUpstream, checked, read_table
from slotkeeper.values import Address, host_name, network

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

    upstream: Annotated[tuple[str, ...], NoDecode] = Field(
        default=("http://127.0.0.1:8081",),
        description=("URL of a llama-server, or NAME=URL; repeat it for several engines with the same model"),
    )
    upstreams_file: Path | None = Field(
        default=None,
        description=(
            "TOML file with a table for each further engine (`slotkeeper docs engines`); read again at "
            "SIGHUP: added engines are used, removed ones are drained"
        ),
    )
    listen: str = Field(default="127.0.0.1:8080", description="where clients connect, HOST:PORT")
    admin_listen: str = Field(default=USUAL_ADMIN_LISTEN, description="metrics, probes and state, HOST:PORT")
    slot_dir: Path | None = Field(
        default=None,
        description=(
            "folder for snapshots of slots: the engine's --slot-save-path, as this machine sees it; on a "
            "local disk, or on a tmpfs if there is enough memory (then with --cold-dir)"
        ),
    )
    cold_dir: Path | None = Field(
        default=None,
        description=(
            "folder for snapshots that have no room in the slot folder: on a larger or slower disk, or on "
            "one that outlives a tmpfs; only Slotkeeper needs access to it"
        ),
    )
    shared_slot_dir: bool = Field(
        default=False,
        description=(
            "allow the slot folder and the cold folder to be writable for a group or for all, like volumes "
            "of a pod; a user who can write there can make the engine load other files"
        ),
    )
    hot_bytes: BudgetSize = Field(
        default="auto",
        description=(
            "room for snapshots in the slot folder; the least valuable move to the cold folder or go; auto: "
            "a quarter of what is free on its disk without them, up to half if four of the model's largest "
            "states need that; of memory (a tmpfs) half as much"
        ),
    )
    cold_bytes: BudgetSize = Field(
        default="auto", description="room for snapshots in the cold folder; auto: as for --hot-bytes"
    )
    cold_store: str = Field(
        default="",
        description=(
            "a store that several sidecars share, instead of a cold folder: s3://BUCKET/PREFIX (credentials "
            "and endpoint from the variables AWS_...), or a folder that all of them see "
            "(`slotkeeper docs shared-store`); needs the extra `s3`"
        ),
    )
    store_key_file: Path | None = Field(
        default=None,
        description="file with a secret of 32 bytes or more, the same for all sidecars; encrypts the store",
    )
    cold_store_bytes: ByteSize = Field(
        default=ByteSize(512 * 2**30),
        ge=0,
        description="room in the shared store, for all sidecars; least recently used states go; 0: no limit",
    )
    hints: SecretStr | None = Field(
        default=None,
        description=(
            "URL of a Redis or Valkey, redis://HOST:6379/0, that makes the shared store quicker: sidecars "
            "record there what the store has and which states they write; needs the extra `hints`"
        ),
    )
    evacuate: bool = Field(
        default=False,
        description=(
            "when the sidecar stops, move all snapshots from the slot folder to the cold folder or shared "
            "store; for a slot folder that ends with the sidecar (a tmpfs, an emptyDir of a pod)"
        ),
    )
    hourly_bytes: BudgetSize = Field(
        default="auto",
        description=(
            "bytes that may be written in an hour for conversations that pause and for beginnings that "
            "several share, because disks wear out; saves before an eviction are not counted; auto: a "
            "sixteenth of the disk's size, and no limit in memory"
        ),
    )
    save_pause: float = Field(
        default=0.25,
        ge=0,
        description="seconds without a request until a conversation is saved; longer if saves are slow",
    )
    save_timeout: float = Field(
        default=60.0, ge=0, description="seconds that saving and moving may take when the sidecar stops"
    )
    idle_tokens: int = Field(
        default=1_000_000,
        ge=0,
        description=(
            "prompt tokens that may be computed per hour in idle time, so that the next turn finds "
            "its prefix ready (prefetch); 0: off"
        ),
    )
    engine_wait: float = Field(
        default=60.0,
        ge=0,
        description=(
            "seconds that requests wait for an engine that loads, is probed, or has ended; when it is up "
            "they are sent (again), unless their answer had begun; 0: answer them with an error at once"
        ),
    )
    swap_wait: float = Field(
        default=10.0,
        ge=0,
        description=(
            "seconds that a request whose model is not loaded waits, at most, for requests of the loaded "
            "models; then no more of those begin, and the router swaps the models"
        ),
    )
    engine_frozen_after: float = Field(
        default=30.0,
        gt=0,
        description=(
            "seconds without any answer of the engine, not even to GET /health, until it counts as frozen: "
            "its requests get 504, and `up` restarts it; an engine that computes for long does answer"
        ),
    )
    keep_alive: float = Field(
        default=10.0,
        ge=0,
        description=(
            "seconds of silence after which a streaming client gets an SSE comment, while its request "
            "waits for a slot, is prepared, or is in prefill; 0: no comments, for clients that cannot read "
            "them (`slotkeeper docs agents`)"
        ),
    )
    rules: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description=(
            "what to do about clients that rewrite their own prompts: NAME=off|observe|fix, where NAME is a "
            "rule or `all`, optionally with @ and a pattern for the User-Agent; the last match counts "
            "(`slotkeeper docs rules`)"
        ),
    )
    probe: bool = Field(
        default=True,
        description=(
            "test an unused engine whose flags cannot be read with 32 to 86 tokens, to learn whether it "
            "makes and keeps checkpoints and which slot files fit it; else that is learnt later, from answers"
        ),
    )
    read_flags: bool = Field(
        default=True,
        description=(
            "read the flags of an engine that runs here as the same user from its process (/proc); else they "
            "are inferred from its behaviour"
        ),
    )
    engine_api_key: SecretStr | None = Field(
        default=None, description="the engine's --api-key, for our own control calls"
    )
    tls_cert: Path | None = Field(
        default=None,
        description=(
            "use TLS on both ports, with this certificate and its intermediate certificates (PEM); read "
            "again at SIGHUP"
        ),
    )
    tls_key: Path | None = Field(
        default=None, description="key of the certificate (PEM), if the certificate's file does not have it"
    )
    keys_file: Path | None = Field(
        default=None,
        description=(
            "serve only clients with a key of this TOML file (`slotkeeper docs security`); the engine gets "
            "--engine-api-key instead of theirs; read again at SIGHUP"
        ),
    )
    admin_host: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description=(
            "a host name under which the admin port may be called, besides localhost and IP addresses: the "
            "host name or Service by which others reach it; may be given several times"
        ),
    )
    admin_token: SecretStr | None = Field(
        default=None, description="bearer token of the admin port; needed unless it listens on loopback"
    )
    namespaces: Literal["auto", "key", "off"] = Field(
        default="auto",
        description=(
            "key: tokens computed for one API key are never reused for another; off: all keys share a cache; "
            "auto: off until an engine has accepted a second key, from then on key "
            "(`slotkeeper docs security`)"
        ),
    )
    slot_actions: Literal["auto", "on", "off"] = Field(
        default="auto",
        description=(
            "on: clients may save, restore and erase slots themselves (POST /slots/N?action=...), in files "
            "that are not ours; off: that is refused with 403; auto: off if namespaces are on"
        ),
    )
    api_prefix: str = Field(default="", description="the engine's --api-prefix")
    max_body_bytes: ByteSize = Field(
        default=ByteSize(64 * 2**20), gt=0, description="larger request bodies are refused with 413"
    )
    all_bodies_bytes: ByteSize = Field(
        default=ByteSize(512 * 2**20),
        gt=0,
        description="room for the bodies of all requests that are being read or answered; else 429",
    )
    write_timeout: float = Field(
        default=30.0,
        gt=0,
        description=(
            "seconds that a client has to continue reading when its read-ahead buffer is full; then its "
            "connection is reset, so that its slot is free; at most 5 seconds, whether the buffer is full "
            "or not, while other requests wait for a slot"
        ),
    )
    read_ahead_bytes: ByteSize = Field(
        default=ByteSize(4 * 2**20),
        ge=0,
        description="room for bytes of one answer that its client has not read yet",
    )
    read_ahead_total: ByteSize = Field(
        default=ByteSize(256 * 2**20), ge=0, description="the same for all answers together"
    )
    body_timeout: float = Field(
        default=30.0,
        gt=0,
        description=(
            "seconds that a request's body may take to arrive, plus one for each 16 KiB of it; else 408"
        ),
    )
    head_timeout: float = Field(
        default=20.0,
        gt=0,
        description="seconds within which a new connection must send a request's head, or it is closed",
    )
    max_connections: int = Field(
        default=8192,
        ge=1,
        description=(
            "client connections on the data port; fewer if the system grants fewer file descriptors"
        ),
    )
    max_connections_per_address: int = Field(
        default=4096, ge=1, description="of these, from one address (one /64 of IPv6)"
    )
    max_waiting: int = Field(default=4000, ge=1, description="requests that may wait for a slot; else 429")
    max_waiting_per_client: int = Field(
        default=1000, ge=1, description="of these, from one client: one key, else one address"
    )
    trusted_proxies: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description=(
            "proxies in front, ADDRESS or NETWORK/BITS, whose X-Forwarded-For is trusted: without keys, it "
            "distinguishes clients"
        ),
    )
    drain_delay: float = Field(
        default=2.0,
        ge=0,
        description="seconds from SIGTERM (readyz turns 503) until new connections are refused",
    )
    drain_timeout: float = Field(
        default=300.0, ge=0, description="seconds that running answers get to finish after that"
    )
    why_requests: int = Field(
        default=500,
        ge=0,
        le=1_000_000,
        description="how many of the last requests `slotkeeper why` and the dashboard explain; 0 keeps none",
    )
    why_text: bool = Field(
        default=False,
        description=(
            "keep excerpts of prompts around the places where they diverge, in memory only, and show them "
            "on the admin port"
        ),
    )
    record: Path | None = Field(
        default=None,
        description=(
            "write every request to trace files in this folder, for `replay` and `lint`: whole prompts, "
            "without credentials"
        ),
    )
    record_bytes: ByteSize = Field(
        default=ByteSize(2**30), ge=0, description="room for trace files; the oldest are removed first"
    )
    otlp_endpoint: str = Field(
        default="",
        description=(
            "send a span for each request to this OpenTelemetry collector, http://HOST:4318; needs the "
            "extra `otel`; the OTEL_* variables set the rest"
        ),
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="debug, info, warning or error"
    )
    log_format: Literal["auto", "json", "console"] = Field(
        default="auto", description="json, console, or auto: console on a terminal"
    )

    @field_validator("upstream", "rules", "admin_host", "trusted_proxies", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return [part.strip() for part in value.split(",")] if isinstance(value, str) else value

    @field_validator("upstream")
    @classmethod
    def _urls(cls, value: tuple[str, ...]) -> tuple[str, ...]:
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

    def engines(self) -> tuple[NamedUpstream, ...]:
        """Return all named engines, reading the file anew. With a file, the default address is not used.

        Raises UpstreamsError.
        """
        given = self.upstream if "upstream" in self.model_fields_set or not self.upstreams_file else ()
        listed = read_table(self.upstreams_file) if self.upstreams_file else ()
        return checked((*map(NamedUpstream.parse, given), *listed))

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
