"""The invite string: what parses, what doesn't, and which part is blamed."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.invite import Invite, InviteError, check_host_port, parse
from protos.messages import PeerId, Token
from protos.signing import Identity, Purpose, seal
from protos.wire import encode

RUN, COORDINATOR = (Identity.from_private_bytes(bytes([i]) * 32) for i in (1, 2))
BASE = f"barnraise://{RUN.peer}@example.org:8080"


def token(run: PeerId = RUN.peer, body_run: PeerId = RUN.peer, purpose: Purpose = Purpose.TOKEN) -> bytes:
    return seal(COORDINATOR, purpose, run, encode(Token(body_run, bytes(16), 1, 3600.0, 0.0)))


TOKEN = token()


def in_base64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


HOSTS = st.lists(
    st.builds(
        lambda host, port: f"{host}:{port}",
        st.sampled_from(["localhost", "a-b.example.org", "x_y", "127.0.0.1", "[::1]", "[2001:db8::2]", "a.b."]),
        st.integers(1, 65535),
    ),
    min_size=1,
    max_size=4,
).map(tuple)


@given(HOSTS, st.sampled_from([b"", TOKEN]))
@settings(max_examples=40)
def test_an_invite_comes_back(hosts: tuple[str, ...], some_token: bytes) -> None:
    invite = Invite(RUN.peer, hosts, some_token)
    assert parse(str(invite)) == invite


def test_the_form_of_an_invite() -> None:
    assert str(Invite(RUN.peer, ("h:1", "[::1]:2"))) == f"barnraise://{RUN.peer}@h:1,[::1]:2"
    assert str(Invite(RUN.peer, ("h:1",), TOKEN)) == f"barnraise://{RUN.peer}@h:1?token={in_base64(TOKEN)}"


def test_white_space_around_is_dropped() -> None:
    assert parse(f"  {BASE}\r\n") == Invite(RUN.peer, ("example.org:8080",))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is empty"),
        (" \n", "is empty"),
        ("http://example.org:8080", "begins with 'http://example.org:8' instead of barnraise://"),
        (RUN.peer, "instead of barnraise://"),
        (BASE.upper(), "instead of barnraise://"),
        (BASE + BASE, "two invites glued together: the second begins at 'barnraise://"),
        (f"{BASE} {BASE}", "two invites glued together"),
        (f"{BASE}\n{BASE}", "two invites glued together"),
        (f"{BASE},http://other:80", "two invites glued together: the second begins at"),
        (f"{BASE}{RUN.peer}@h:1", "is not a number|not one HOST:PORT"),
        (f"barnraise://{RUN.peer}@exam ple.org:80", r"the character ' ', after '.*@exam', can't be"),
        (f"barnraise://{RUN.peer}@exam\u200bple.org:80", r"the character '\\u200b'"),
        (f"barnraise://{RUN.peer}@a:1,\nb:2", r"the character '\\n', after '.*a:1,'"),
        ("barnraise://example.org:80", "no @ between run id and HOST:PORT in 'example.org:80'"),
        (f"barnraise://{RUN.peer}", "no @ between"),
        (f"barnraise://{RUN.peer}@", "no HOST:PORT after the @"),
        (f"barnraise://{RUN.peer}@?token=abc", "no HOST:PORT after the @"),
        ("barnraise://@h:1", "run id '' is no peer id"),
        (f"barnraise://{RUN.peer[:-1]}@h:1", f"run id '{RUN.peer[:-1]}' is no peer id"),
        ("barnraise://QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N@h:1", "run id 'Qm.*' is no peer id"),
        (f"barnraise://{RUN.peer}@h", "'h' is not HOST:PORT"),
        (f"barnraise://{RUN.peer}@:80", "':80' is not HOST:PORT"),
        (f"barnraise://{RUN.peer}@h:", "the port '' of 'h:'"),
        (f"barnraise://{RUN.peer}@h:0", "the port '0' of 'h:0' is not a number from 1 to 65535"),
        (f"barnraise://{RUN.peer}@h:65536", "the port '65536'"),
        (f"barnraise://{RUN.peer}@h:080808", "the port '080808'"),
        (f"barnraise://{RUN.peer}@h:8a", "the port '8a'"),
        (f"barnraise://{RUN.peer}@h:-1", "the port '-1'"),
        (f"barnraise://{RUN.peer}@h:٣", "the port"),
        (f"{BASE}/", "the port '8080/'"),
        (f"{BASE}#x", "the port '8080#x'"),
        (f"{BASE},", "'' is not HOST:PORT"),
        (f"{BASE},,h:1", "'' is not HOST:PORT"),
        (f"barnraise://{RUN.peer}@10.0.0.1:8010.0.0.2:80", "'10.0.0.1:8010.0.0.2:80' is not one HOST:PORT"),
        (f"barnraise://{RUN.peer}@::1:80", "'::1:80' is not one HOST:PORT .an IPv6 address stands in brackets"),
        (f"barnraise://{RUN.peer}@[::g]:80", "'::g' in .* is no IPv6 address"),
        (f"barnraise://{RUN.peer}@[10.0.0.1]:80", "'10.0.0.1' in .* is no IPv6 address"),
        (f"barnraise://{RUN.peer}@[fe80::1%eth0]:80", "is no IPv6 address"),
        (f"barnraise://{RUN.peer}@10.0.0.256:80", "the host '10.0.0.256' .* neither an address nor a name"),
        (f"barnraise://{RUN.peer}@user@h:80", "the host 'user@h'"),
        (f"barnraise://{RUN.peer}@-h:80", "the host '-h'"),
        (f"barnraise://{RUN.peer}@h..i:80", "the host 'h..i'"),
        (f"barnraise://{RUN.peer}@{'a' * 64}:80", "the host 'aaa"),
        (f"barnraise://{RUN.peer}@{','.join(['h:1'] * 17)}", "17 addresses; there are at most 16"),
        (f"{BASE}?", "'' is unknown after the [?]"),
        (f"{BASE}?tokens=abc", "'tokens' is unknown"),
        (f"{BASE}?token={in_base64(TOKEN)}&run=x", "'run' is unknown"),
        (f"{BASE}?token={in_base64(TOKEN)}&token={in_base64(TOKEN)}", "token is given twice"),
        (f"{BASE}?token=", "the token '' is no base64url"),
        (f"{BASE}?token=a", "the token 'a' is no base64url"),
        (f"{BASE}?token=ab==", "the token 'ab==' is no base64url"),
        (f"{BASE}?token=a+/b", "no base64url"),
        (f"{BASE}?token=ab", "no base64url"),  # stray bits: another spelling of "aQ"
        (f"{BASE}?token=AAAA", "the token is damaged or another run's: no envelope"),
        (f"{BASE}?token={in_base64(TOKEN)[:-4]}", "the token is damaged"),
        (f"{BASE}?token={in_base64(token(run=COORDINATOR.peer))}", "the token is damaged or another run's"),
        (f"{BASE}?token={in_base64(token(body_run=COORDINATOR.peer))}", f"the token is for run {COORDINATOR.peer}"),
        (f"{BASE}?token={in_base64(token(purpose=Purpose.RECORD))}", "one for 'token' is needed"),
        (BASE + "x" * 9000, "characters; there are at most 8192"),
    ],
)
def test_what_is_no_invite_names_the_part(text: str, why: str) -> None:
    with pytest.raises(InviteError, match=why):
        parse(text)


@given(st.text(max_size=60) | st.text("barnise:/@.,?token=[]0123 \n", max_size=60).map(lambda text: BASE + text))
def test_any_text_gives_an_invite_or_an_invite_error(text: str) -> None:
    invite, why = None, ""
    try:
        invite = parse(text)
    except InviteError as error:
        why = str(error)
    assert why.isprintable()  # it is shown in a terminal
    assert (invite is None) == bool(why)
    assert invite is None or parse(str(invite)) == invite


def test_an_invite_that_can_not_be_is_not_made() -> None:
    for run, hosts in ((PeerId("ada"), ("h:1",)), (RUN.peer, ()), (RUN.peer, ("h",))):
        with pytest.raises(InviteError):
            Invite(run, hosts)


def test_a_token_is_a_secret_and_not_in_the_repr() -> None:
    invite = Invite(RUN.peer, ("h:1",), TOKEN)
    assert in_base64(TOKEN) not in repr(invite)
    assert repr(invite) == f"Invite({RUN.peer}@h:1, token of {len(TOKEN)} bytes)"


def test_host_and_port_come_apart() -> None:
    assert check_host_port("[2001:db8::2]:4000") == ("2001:db8::2", 4000)
    assert check_host_port("example.org:1") == ("example.org", 1)
