"""Settings: ``kv_connector_extra_config`` over the environment over defaults.

Every field is documented where it is defined; ``docs/settings_table.py`` makes the table of docs/settings.md of it.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvferry.transport.control.key_file import read_key_file, shared_key
from kvferry.transport.control.keys import Keys, raw_key
from kvferry.transport.errors import PRINTABLE, ConfigError, did_you_mean
from kvferry.transport.host import AllowedPeers
from kvferry.transport.registry import plane_names

AUTO = "auto"
"""The setting ``plane`` that lets every pair of ranks take the fastest data plane that both have."""
_MIB = 1 << 20
_Port = Annotated[int, Meta(ge=0, le=65535)]
_Line = Annotated[str, Meta(min_length=1, max_length=256, pattern=PRINTABLE)]
_Seconds = Annotated[float, Meta(gt=0, le=7 * 86400)]


def _doc(text: str) -> Meta:
    return Meta(description=text)


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All settings of one engine. Times are seconds, sizes are bytes."""

    side_channel_host: Annotated[str, _doc("address that the control port binds to: one interface, never all")] = (
        "127.0.0.1"
    )
    side_channel_port: Annotated[
        _Port, _doc("control port of rank 0; rank r uses this port + r; 0: a free port is found")
    ] = 0
    advertise_host: Annotated[str | None, _doc("address that peers connect to; where unset, side_channel_host")] = None
    plane: Annotated[
        str, _doc("data plane; auto takes the fastest that works; a plane named here is used, or the start fails")
    ] = AUTO
    slot_bytes: Annotated[
        Annotated[int, Meta(ge=64 << 10, le=256 * _MIB)] | None,
        _doc(
            "size of one staging slot, which is the largest data message; "
            "where unset 4 MiB in host memory; on GPUs 8 MiB for shm and tcp, 32 MiB or more for nixl and ucx"
        ),
    ] = None
    staging_bytes: Annotated[
        Annotated[int, Meta(ge=_MIB, le=64 << 30)] | None,
        _doc(
            "most staging memory that one rank takes for each direction; "
            "where unset 256 MiB in host memory, 512 MiB on GPUs, or 4 slots"
        ),
    ] = None
    step_hold_seconds: Annotated[
        Annotated[float, Meta(ge=0, le=1)],
        _doc(
            "how long a load may be expected to hold up a step of others; D loads inside the step that computes with "
            "the tokens if the copy should need at most this much, or one step, longer than the step before; other "
            "loads begin beside the steps, and a step joins them as they end; 0: all end beside the steps"
        ),
    ] = 0.01
    prefix_reads: Annotated[
        bool,
        _doc(
            "other engines may read prefixes of prompts that this engine has in its KV cache, and requests may name "
            "engines (`sources`) from which this engine reads a prefix"
        ),
    ] = False
    prefix_wait_seconds: Annotated[
        _Seconds, _doc("how long a request waits at most for a source to say how much of its prompt it has")
    ] = 0.02
    lease_seconds: Annotated[
        _Seconds,
        _doc(
            "how long P holds the blocks of a prompt if no message from D arrives; 20 times as long at most, even if D "
            "renews the lease; a third of it, a request for blocks that arrives before the lease exists"
        ),
    ] = 30.0
    handover_timeout_seconds: Annotated[
        _Seconds,
        _doc(
            "how long the hand-over of one request may take on D, with all attempts, whatever progress it makes; a "
            "quarter of it, 30 s at least, without progress, a twelfth, 10 s at least, until P answers a handshake"
        ),
    ] = 120.0
    allowed_peers: Annotated[
        Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=256)] | None,
        _doc(
            "networks that D may connect to, such as 10.1.0.0/16; requests name the addresses of P; in the environment "
            "separated by commas. Where unset, keys decide"
        ),
    ] = None
    convert_dtype: Annotated[
        bool, _doc("on D: convert KV of another dtype or with other fp8 scales; where False, such a P is refused")
    ] = False
    model_tag: Annotated[
        _Line | None,
        _doc(
            "a name for the weights and their quantization, equal on P and D and compared in their place; where unset, "
            "a digest of the weights is"
        ),
    ] = None
    key_file: Annotated[
        str | None,
        _doc(
            "file with this engine's secret key, as `kvferry keygen` makes it, the same for all engines or one for "
            "each; where unset, all engines of one user on one host share a file that the first of them makes"
        ),
    ] = None
    peer_keys: Annotated[
        tuple[Annotated[str, Meta(max_length=64)], ...],
        Meta(max_length=1024),
        _doc(
            "public keys of peers that have another secret key, and that this engine admits and connects to; in the "
            "environment separated by commas"
        ),
    ] = ()
    encrypt: Annotated[
        bool,
        _doc(
            "KV bytes that leave the host are encrypted: over `tcp` with AES-256-GCM; planes that cannot encrypt are "
            "not used between hosts. P and D encrypt where one of them has it; in the environment 1 or 0"
        ),
    ] = False

    @property
    def advertised_host(self) -> str:
        """The address that goes into ``kv_transfer_params``."""
        return self.advertise_host or self.side_channel_host

    @property
    def lease_cap_seconds(self) -> float:
        """How long P holds the blocks at most, even if D renews the lease."""
        return 20 * self.lease_seconds

    @property
    def ask_hold_seconds(self) -> float:
        """How long P keeps a request for blocks that arrives before the lease exists."""
        return self.lease_seconds / 3

    @property
    def handshake_timeout_seconds(self) -> float:
        """How long D waits for the answer to its handshake."""
        return max(10.0, self.handover_timeout_seconds / 12)

    @property
    def transfer_timeout_seconds(self) -> float:
        """How long a hand-over may make no progress before it fails."""
        return max(30.0, self.handover_timeout_seconds / 4)


ENVIRONMENT = {
    "side_channel_host": "KVFERRY_SIDE_CHANNEL_HOST",
    "side_channel_port": "KVFERRY_SIDE_CHANNEL_PORT",
    "advertise_host": "KVFERRY_ADVERTISE_HOST",
    "plane": "KVFERRY_PLANE",
    "allowed_peers": "KVFERRY_ALLOWED_PEERS",
    "key_file": "KVFERRY_KEY_FILE",
    "peer_keys": "KVFERRY_PEER_KEYS",
    "encrypt": "KVFERRY_ENCRYPT",
}
"""Settings that an environment variable can give, and its name; an empty variable counts as unset."""
_EXPECTED = {"encrypt": "expected 1 or 0", "side_channel_port": "expected a number from 0 to 65535"}
REMOVED = {
    "bootstrap_port": "have the router send P's remote_host and remote_port to D",
    "checksum": "set encrypt in its place",
    "require_plane": "name the one in plane",
    "copy_sms": "leave it out",
    "lease_cap_seconds": "it is 20 times lease_seconds",
    "ask_hold_seconds": "it is a third of lease_seconds",
    "handshake_timeout_seconds": "it is a twelfth of handover_timeout_seconds, 10 at least",
    "transfer_timeout_seconds": "it is a quarter of handover_timeout_seconds, 30 at least",
    "secret_key": "give a file of it, in key_file",
}
"""Settings that are gone, and what to do."""
PREFIX = "KVFERRY_"
_VARIABLES = (*ENVIRONMENT.values(), "KVFERRY_TRITON_LAUNCHER")
_SERVICE_LINK = re.compile(
    rf"{PREFIX}(.+_)?(SERVICE_(HOST|PORT(_.+)?)|PORT_\d+_.+)=.*|{PREFIX}(.+_)?PORT=\w+://.*", re.DOTALL
)


def unknown_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """What is wrong with each variable of KVFerry's prefix that nothing reads, by its name. ``environ``: ``os.environ``
    where ``None``. What Kubernetes sets for a Service of such a name is left out."""
    found = {}
    for name, value in sorted((os.environ if environ is None else environ).items()):
        if name.startswith(PREFIX) and name not in _VARIABLES and not _SERVICE_LINK.fullmatch(f"{name}={value}"):
            field = name.removeprefix(PREFIX).lower()
            extra = field in Settings.__struct_fields__ and f" ({field} is given in kv_connector_extra_config)"
            gone = field in REMOVED and f"the setting is gone; {REMOVED[field]}"
            found[name] = gone or f"no setting has this variable{extra or did_you_mean(name, _VARIABLES)}"
    return found


def load_settings(extra: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Settings:
    """Settings from ``kv_connector_extra_config`` and the environment. ``extra``: what the user wrote; it takes
    precedence over the environment, which is ``os.environ`` where ``None``.

    Raises:
        ConfigError: an unknown name (with the nearest known one), one that is gone (with what to do), a wrong type or
            range, or settings that contradict each other; one line.
    """
    environ = os.environ if environ is None else environ
    known = Settings.__struct_fields__
    for name in extra:
        if name in REMOVED:
            raise ConfigError(f"kv_connector_extra_config: the setting {name!r} is gone; {REMOVED[name]}")
        if name not in known:
            raise ConfigError(
                f"kv_connector_extra_config: unknown setting {name!r}{did_you_mean(str(name), known)}; "
                f"known are {', '.join(sorted(known))}"
            )
    for variable, why in unknown_variables(environ).items():
        if variable.removeprefix(PREFIX).lower() in REMOVED:
            raise ConfigError(f"{variable}: {why}")
    values, origin = dict[str, Any](), dict[str, str]()
    for field, variable in ENVIRONMENT.items():
        if text := environ.get(variable, "").strip():
            values[field] = _from_text(field, text)
            origin[field] = variable
    values |= extra
    origin |= {name: f"kv_connector_extra_config[{name!r}]" for name in extra}
    for name, value in values.items():  # one by one, so that the message can name the setting
        try:
            msgspec.convert({name: value}, Settings)
        except msgspec.ValidationError as error:
            reason = str(error).split(" - at ")[0]
            if isinstance(value, str) and origin[name] == ENVIRONMENT.get(name) and name in _EXPECTED:
                reason = _EXPECTED[name] + ("; Kubernetes sets it for a Service of this name" if "://" in value else "")
            raise ConfigError(f"{origin[name]}: {_short(value)} is not usable: {reason}") from None
        if name == "plane" and value not in (planes := plane_choices()):
            reason = f"expected one of {', '.join(planes)}{did_you_mean(value, planes)}"
            raise ConfigError(f"{origin[name]}: {_short(value)} is not usable: {reason}")
    settings = msgspec.convert(values, Settings)
    _check_together(settings)
    return settings


def _from_text(field: str, text: str) -> object:
    if field in ("allowed_peers", "peer_keys"):
        return [item.strip() for item in text.split(",")]
    if field == "encrypt":
        return {"0": False, "false": False, "1": True, "true": True}.get(text.lower(), text)
    return int(text) if field.endswith("port") and text.isascii() and text.isdigit() else text


def plane_choices() -> tuple[str, ...]:
    """The values of the setting ``plane``: ``auto``, and every registered data plane."""
    return AUTO, *plane_names()


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:76]} ..."


def _check_host(name: str, host: str) -> None:
    """One address or name: no URL, no port, not all interfaces."""
    odd = any(mark in host for mark in "/[]@, ") or not host.isprintable() or len(host) > 253
    if odd or host.count(":") == 1:
        raise ConfigError(f"{name}: {_short(host)} is not a bare host; expected an address or a name, the port apart")
    try:
        everywhere = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        everywhere = host in ("", "*", "0")  # "0" is 0.0.0.0 to the resolver
    if everywhere and name == "side_channel_host":
        raise ConfigError(f"{name}: {host!r} would listen on all interfaces; name the one address that peers reach")
    if everywhere:
        raise ConfigError(f"{name}: {host!r} is no address that a peer could connect to; name the one that peers reach")


def _check_together(settings: Settings) -> None:
    _check_host("side_channel_host", settings.side_channel_host)
    if settings.advertise_host is not None:
        _check_host("advertise_host", settings.advertise_host)
    AllowedPeers(settings.allowed_peers)
    slot_bytes = settings.slot_bytes or 4 * _MIB
    if settings.staging_bytes is not None and settings.staging_bytes < 4 * slot_bytes:
        raise ConfigError(
            f"staging_bytes: {settings.staging_bytes} holds fewer than 4 slots of slot_bytes={slot_bytes}; "
            f"give at least {4 * slot_bytes} or smaller slots"
        )
    for number, key in enumerate(settings.peer_keys):
        raw_key(f"peer_keys[{number}]", key)


def load_keys(settings: Settings) -> Keys:
    """The keys of an engine; the first engine of a user on a host makes them.

    Raises:
        ConfigError: the key file cannot be used or made; one line.
    """
    if settings.key_file is None:
        return Keys(shared_key(), settings.peer_keys)
    try:
        return Keys(read_key_file(Path(settings.key_file)), settings.peer_keys)
    except FileNotFoundError:
        raise ConfigError(
            f"key_file: {_short(settings.key_file)} does not exist; make it with `kvferry keygen {settings.key_file}`"
        ) from None
