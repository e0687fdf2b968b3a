import difflib

import pytest
from kvquota.daemon.near import near_names

MANY = [f"team-{n % 7}/a-rather-long-name-of-a-model/{'x' * 60}/replica-{n}" for n in range(2000)]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        (MANY[1234].replace("rather", "rathr"), MANY[1234]),
        (MANY[7][1:], MANY[7]),
        (MANY[1999] + "9", MANY[1999]),
        ("chat-larg", "chat-large"),
        ("hat-large", "chat-large"),
    ],
)
def test_what_was_meant_is_found_among_many(name: str, meant: str) -> None:
    assert meant in near_names(name, [*MANY, "chat-large"])


def test_what_resembles_nothing_is_near_nothing() -> None:
    assert near_names("other", ["chat-large"]) == []
    assert near_names("other", []) == []


def test_few_of_many_names_are_compared_closely(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    real = difflib.SequenceMatcher.set_seq1

    def set_seq1(matcher: "difflib.SequenceMatcher[str]", other: str) -> None:
        compared.append(other)
        real(matcher, other)

    monkeypatch.setattr(difflib.SequenceMatcher, "set_seq1", set_seq1)
    assert near_names(MANY[3][:-1], MANY)
    assert 0 < len(compared) < 50
