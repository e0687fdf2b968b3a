import re
from decimal import Decimal, localcontext

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kvquota.kvctl.sizes import MAX_BYTES, format_limit, format_size, parse_limit, parse_size

UNITS = "KMGTPE"
UNIT = st.sampled_from([f"{unit}{end}" for unit in UNITS for end in ("", "i", "B", "iB")])
SIZE = st.integers(0, MAX_BYTES)


def scale(unit: str) -> int:
    return int(1024 ** (1 + UNITS.index(unit[0].upper())))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("0G", 0),
        ("0.0G", 0),
        ("1", 1),
        ("1B", 1),
        ("512M", 512 << 20),
        ("2G", 2 << 30),
        ("1.5GiB", 3 << 29),
        ("1.5 GiB", 3 << 29),
        ("1.5gib", 3 << 29),
        ("4k", 4096),
        ("7E", 7 << 60),
        ("007", 7),
        ("1.3G", 1395864371),
        ("9223372036854775807", MAX_BYTES),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size
    assert parse_limit(text) == size


@pytest.mark.parametrize("text", ["none", "None", "NONE"])
def test_no_limit(text: str) -> None:
    assert parse_limit(text) is None


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            " ",
            "12Q",
            "-1",
            "-1G",
            "+1",
            "1e9",
            "0x10",
            "nan",
            "inf",
            "1_000",
            "1,5G",
            "1.5.5G",
            ".5G",
            "5.G",
        ),
        *(
            "G",
            "B",
            "1 000",
            " 1G",
            "1G ",
            "1  G",
            "1Gb/s",
            "1GBi",
            "1GiBs",
            "1KK",
            "1G\n",
            "null",
            "nothing",
        ),
        *("1\u212a", "1G\u0131", "\u0661G", "\uff11G", "1G\udcff", "50%", "1.5", "0.5B", "1.0001B"),
        *("8E", "9223372036854775808", "1" * 40, "9" * 5000, "0." + "0" * 40 + "1G"),
        *("0.0000000001G", "0.0001K"),
    ],
)
def test_bad_sizes_are_named(text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(repr(text))} is .*: write "):
        parse_limit(text)


@given(SIZE)
def test_bytes_round_trip(size: int) -> None:
    assert parse_size(str(size)) == parse_size(f"{size}B") == size


@given(st.integers(0, 2**63 // 1024**6 - 1) | st.integers(0, 10**6), UNIT)
def test_every_suffix_is_binary(number: int, unit: str) -> None:
    if number * scale(unit) <= MAX_BYTES:
        assert parse_size(f"{number}{unit}") == parse_size(f"{number} {unit.lower()}") == number * scale(unit)


@given(SIZE, st.sampled_from("KMGT"))
def test_an_exact_fraction_loses_no_byte(size: int, unit: str) -> None:
    with localcontext() as context:
        context.prec = 100
        assert parse_size(f"{Decimal(size) / scale(unit):f}{unit}") == size


@given(SIZE)
@example(1023)
@example(1024)
@example((1 << 20) - 1)
@example((1 << 30) - 1)
@example(MAX_BYTES)
def test_what_people_read_is_within_half_a_hundredth(size: int) -> None:
    text = format_size(size)
    number, _, unit = text.partition(" ")
    # Half a hundredth of a unit, of which there is at least one, is less than 1/200.
    shown = 8 << 60 if text == "8 EiB" else parse_size(text)
    assert abs(shown - size) <= size // 200 + 1
    assert float(number) < 1024
    assert unit or size == 0


@given(st.integers(1, 1023), st.sampled_from("KMGTP"))
def test_whole_units_round_trip(number: int, unit: str) -> None:
    assert format_size(number * scale(unit)) == f"{number} {unit}iB"


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (3 << 29, "1.5 GiB"),
        ((1 << 30) + (1 << 24), "1.02 GiB"),
        ((1 << 30) - 1, "1 GiB"),
        (123456789, "117.74 MiB"),
        (10 << 30, "10 GiB"),
        (100 << 20, "100 MiB"),
    ],
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert format_size(size) == text


def test_no_limit_is_not_zero() -> None:
    assert (format_limit(None), format_limit(0)) == ("none", "0")
