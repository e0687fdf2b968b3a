import gc
import json
import math
import os
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvquota.native import packet
from kvquota.native.packet import PacketError

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for sock in (left, right):
        sock.settimeout(10)
    with left, right:
        yield left, right


@pytest.fixture
def no_descriptor_left() -> Iterator[None]:
    # What other tests left behind must not go meanwhile.
    gc.collect()
    before = sorted(os.listdir("/proc/self/fd"))
    yield
    assert sorted(os.listdir("/proc/self/fd")) == before


def raw_send(sock: socket.socket, payload: bytes, fds: list[int]) -> None:
    sock.sendmsg([payload], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))])


@pytest.mark.usefixtures("no_descriptor_left")
def test_a_packet_arrives_whole_with_its_descriptors(pair: Pair) -> None:
    left, right = pair
    read, write = os.pipe()
    packet.send(left, b"first", [write])
    packet.send(left, b"x" * packet.MAX_BYTES)
    os.close(write)
    first, second = packet.receive(right, 2), packet.receive(right)
    assert first is not None
    assert first.payload == b"first"
    assert not os.get_inheritable(first.fds[0])
    os.write(first.fds[0], b"through")
    assert os.read(read, 7) == b"through"
    for fd in (read, *first.fds):
        os.close(fd)
    assert second == (b"x" * packet.MAX_BYTES, [])


@pytest.mark.parametrize("payload", [b"", b"x" * (packet.MAX_BYTES + 1)])
def test_what_must_not_be_sent(pair: Pair, payload: bytes) -> None:
    with pytest.raises(PacketError, match=f"{len(payload)} bytes"):
        packet.send(pair[0], payload)


@pytest.mark.usefixtures("no_descriptor_left")
@pytest.mark.parametrize(
    ("payload", "count", "most", "why"),
    [
        (b"x" * (packet.MAX_BYTES + 1), 2, 2, "more than 4096 bytes"),
        (b"x" * 100_000, 0, 0, "more than 4096 bytes"),
        (b"x", 1, 0, "more than 0 descriptors"),
        (b"x", 2, 1, "more than 1 descriptors"),
        (b"x", 4, 3, "more than 3 descriptors"),
        (b"x", 253, 3, "more than 3 descriptors"),
        (b"", 1, 1, "without a payload"),
    ],
)
def test_a_bad_packet_is_refused_and_its_descriptors_closed(
    pair: Pair, payload: bytes, count: int, most: int, why: str
) -> None:
    left, right = pair
    raw_send(left, payload, [0] * count)
    with pytest.raises(PacketError, match=why):
        packet.receive(right, most)
    packet.send(left, b"next")
    assert packet.receive(right, most) == (b"next", [])


def test_the_end(pair: Pair) -> None:
    left, right = pair
    packet.send(left, b"last")
    left.close()
    assert packet.receive(right) == (b"last", [])
    assert packet.receive(right) is None
    assert packet.receive(right) is None
    assert packet.ring(right) is False
    with pytest.raises(BrokenPipeError):
        packet.send(right, b"x")


def test_a_peer_that_goes_without_reading_is_an_end_too(pair: Pair) -> None:
    left, right = pair
    packet.send(right, b"never read")
    left.close()
    assert packet.receive(right) is None


def test_nothing_there_yet(pair: Pair) -> None:
    pair[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        packet.receive(pair[1])


def test_the_doorbell_never_blocks(pair: Pair) -> None:
    left, right = pair
    left.setblocking(True)
    left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    assert all(packet.ring(left) for _ in range(1000))
    right.setblocking(False)
    rung = 0
    try:
        while packet.receive(right) == (packet.DOORBELL, []):
            rung += 1
    except BlockingIOError:
        pass
    assert 0 < rung < 1000
    assert packet.ring(left)
    assert packet.receive(right) == (packet.DOORBELL, [])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), JSON))
def test_a_message_survives_the_way(message: dict[str, Any]) -> None:
    message["kind"] = "test"
    try:
        payload = packet.encode(message)
    except PacketError:
        assert len(json.dumps(message)) > packet.MAX_BYTES
    else:
        assert packet.decode(payload) == message


@pytest.mark.parametrize("value", [math.nan, -math.inf, b"x", {1, 2}, "x" * packet.MAX_BYTES])
def test_a_message_that_cannot_be_sent(value: object) -> None:
    with pytest.raises(PacketError):
        packet.encode({"kind": value})


def test_a_message_that_holds_itself() -> None:
    message: dict[str, object] = {"kind": "x"}
    message["self"] = message
    with pytest.raises(PacketError):
        packet.encode(message)


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (b"", "JSON"),
        (b"!", "JSON"),
        (b"\xff\xfe", "JSON"),
        (b"{", "JSON"),
        (b"{}", "kind is None: expected a string"),
        (b'{"kind":5}', "kind is 5: expected a string"),
        (b'{"kind":"\\ud800"}', "half a character"),
        (b'{"kind":"x"}x', "JSON"),
        (b"[]", "list: expected an object"),
        (b'"kind"', "str: expected an object"),
        (b"null", "NoneType: expected an object"),
        (b'{"kind":"x","kind":"x"}', "twice"),
        (b'{"kind":"x","a":{"b":1,"b":2}}', "twice"),
        (b'{"kind":"x","a":NaN}', "NaN"),
        (b'{"kind":"x","a":-Infinity}', "Infinity"),
        (b'{"kind":"x","a":1e999}', "finite"),
        (b'{"kind":"x","a":' + b"[" * 4000, "nested|JSON"),
        (b"[" * 2000 + b"]" * 2000, "nested|list"),
    ],
)
def test_garbage_is_no_message(payload: bytes, why: str) -> None:
    with pytest.raises(PacketError, match=why):
        packet.decode(payload)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_packet_error(payload: bytes) -> None:
    try:
        message = packet.decode(payload)
    except PacketError:
        return
    assert isinstance(message["kind"], str)


@pytest.mark.parametrize("value", [0, 1, 2**63 - 1])
@pytest.mark.parametrize("read", [packet.integer, packet.optional_integer])
def test_a_field_that_is_an_integer(read: Callable[[dict[str, Any], str], int | None], value: int) -> None:
    assert read({"n": value}, "n") == value


@pytest.mark.parametrize("value", [-1, 2**63, 10**4000, True, 1.0, "1", [1]])
@pytest.mark.parametrize("read", [packet.integer, packet.optional_integer])
def test_a_field_that_is_no_integer(read: Callable[[dict[str, Any], str], int | None], value: object) -> None:
    with pytest.raises(PacketError, match=r"n is .*: expected an integer from 0 to") as caught:
        read({"n": value}, "n")
    assert len(str(caught.value)) < 200


def test_a_field_that_is_not_there() -> None:
    assert packet.optional_integer({}, "n") is None
    assert packet.optional_integer({"n": None}, "n") is None
    with pytest.raises(PacketError, match="n is None"):
        packet.integer({}, "n")
    with pytest.raises(PacketError, match="n is 0: expected an integer from 1"):
        packet.integer({"n": 0}, "n", minimum=1)
