"""The invite: one string that is enough to join a run, `barnraise://RUN_ID@HOST:PORT[,HOST:PORT…][?token=…]`.

HOST:PORT is the coordinator's HTTP. A token is an envelope in base64url without padding.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
from dataclasses import dataclass

from protos import limits
from protos.messages import PeerId, Token
from protos.signing import Purpose, SignatureError, public_key_of, unseal
from protos.wire import WireError, decode

SCHEME = "barnraise://"

_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")
_DIGITS = re.compile(r"[0-9]{1,5}")
_DOTTED = re.compile(r"[0-9.]+")
_BASE64URL = re.compile(r"[A-Za-z0-9_-]+")


class InviteError(ValueError):
    """A string that is no invite: names the part that is wrong."""


@dataclass(frozen=True, slots=True)
class Invite:
    """A run and where its coordinator answers. Raises InviteError where run or hosts can't be."""

    run: PeerId
    hosts: tuple[str, ...]
    token: bytes = b""

    def __post_init__(self) -> None:
        try:
            public_key_of(self.run)
        except SignatureError:
            raise InviteError(
                f"the run id {_shown(self.run)} is no peer id of 52 characters that begins with 12D3Koo"
            ) from None
        if not self.hosts:
            raise InviteError("no HOST:PORT after the @")
        if len(self.hosts) > limits.ADDRESSES:
            raise InviteError(f"{len(self.hosts)} addresses; there are at most {limits.ADDRESSES}")
        for host in self.hosts:
            check_host_port(host)

    def __str__(self) -> str:
        text = f"{SCHEME}{self.run}@{','.join(self.hosts)}"
        return f"{text}?token={_to_base64(self.token)}" if self.token else text

    def __repr__(self) -> str:
        token = f", token of {len(self.token)} bytes" if self.token else ""
        return f"Invite({self.run}@{','.join(self.hosts)}{token})"


def parse(text: str) -> Invite:
    """The invite in the text; white space around it is dropped. Raises InviteError.

    A token's signature is checked as far as it goes without the run's certificates: it is unbroken and for this run.
    """
    text = text.strip()
    if not text:
        raise InviteError(f"the invite is empty; it looks like {SCHEME}RUN_ID@HOST:PORT")
    if len(text) > limits.INVITE_CHARS:
        raise InviteError(f"the invite has {len(text)} characters; there are at most {limits.INVITE_CHARS}")
    if not text.startswith(SCHEME):
        raise InviteError(f"the invite begins with {_shown(text[:20])} instead of {SCHEME}")
    if text.count("://") > 1:
        raise InviteError(f"two invites glued together: the second begins at {_shown(_second(text))}")
    for character in text:
        if character.isspace() or not character.isprintable():
            before = _shown(text[: text.index(character)][-20:])
            raise InviteError(f"the character {character!a}, after {before}, can't be inside an invite")
    rest = text.removeprefix(SCHEME)
    address, question, query = rest.partition("?")
    run, at, hosts = address.partition("@")
    if not at:
        raise InviteError(f"no @ between run id and HOST:PORT in {_shown(address)}")
    if not hosts:
        raise InviteError("no HOST:PORT after the @")
    token = _token(query) if question else b""
    invite = Invite(PeerId(run), tuple(hosts.split(",")), token)
    if token:
        _check_token(invite)
    return invite


def check_host_port(text: str) -> tuple[str, int]:
    """Host (a name, an IPv4, or an IPv6 address without its brackets) and port 1…65535. Raises InviteError."""
    host, colon, port = text.rpartition(":")
    if not text or not colon or not host:
        raise InviteError(f"{_shown(text)} is not HOST:PORT")
    if not _DIGITS.fullmatch(port) or not 1 <= int(port) <= 65535:
        raise InviteError(f"the port {_shown(port)} of {_shown(text)} is not a number from 1 to 65535")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        if not _is_ip(host, 6):
            raise InviteError(f"{_shown(host)} in {_shown(text)} is no IPv6 address")
    elif ":" in host:
        raise InviteError(f"{_shown(text)} is not one HOST:PORT (an IPv6 address stands in brackets)")
    elif not (_is_ip(host, 4) if _DOTTED.fullmatch(host) else _is_name(host)):
        raise InviteError(f"the host {_shown(host)} of {_shown(text)} is neither an address nor a name")
    return host, int(port)


def _is_ip(host: str, version: int) -> bool:
    try:
        return ipaddress.ip_address(host).version == version and "%" not in host  # a zone is known on one machine only
    except ValueError:
        return False


def _is_name(host: str) -> bool:
    labels = host.removesuffix(".").split(".")
    return len(host) <= 253 and all(_LABEL.fullmatch(label) for label in labels)


def _token(query: str) -> bytes:
    token = b""
    for pair in query.split("&"):
        key, _, value = pair.partition("=")
        if key != "token":
            raise InviteError(f"{_shown(key)} is unknown after the ?; only token is known")
        if token:
            raise InviteError("token is given twice")
        token = _from_base64(value)
    return token


def _check_token(invite: Invite) -> None:
    try:
        envelope = unseal(invite.token, purpose=Purpose.TOKEN, run=invite.run, max_bytes=limits.TOKEN_BYTES)
        token = decode(Token, envelope.body)
    except (SignatureError, WireError) as error:
        raise InviteError(f"the token is damaged or another run's: {error}") from None
    if token.run != invite.run:
        raise InviteError(f"the token is for run {token.run}")


def _to_base64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _from_base64(text: str) -> bytes:
    raw = b""
    if _BASE64URL.fullmatch(text):
        try:
            raw = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        except binascii.Error:
            raw = b""
    if not raw or _to_base64(raw) != text:
        raise InviteError(f"the token {_shown(text)} is no base64url without padding")
    return raw


def _second(text: str) -> str:
    separator = text.index("://", len(SCHEME))
    return text[max(text.rfind("barnraise", 0, separator), len(SCHEME)) :]


def _shown(text: str) -> str:
    return ascii(text if len(text) <= 60 else text[:57] + "...")
