import pytest
from kvquota.agent.settings import DEFAULT_RESERVE_BYTES, SettingError, Settings


def test_nothing_asked_is_no_agent() -> None:
    assert Settings.read({}) is None
    assert Settings.read({"KVQUOTA": "0", "KVQUOTA_INSTANCE": ".."}) is None


def test_what_needs_an_agent_says_so() -> None:
    assert Settings.required({"KVQUOTA": "1"}).instance
    for environment in ({}, {"KVQUOTA": "0"}):
        with pytest.raises(SettingError, match="KVQUOTA is not 1"):
            Settings.required(environment)


def test_defaults_need_only_the_switch() -> None:
    settings = Settings.read({"KVQUOTA": "1", "KVQUOTA_INSTANCE": "llm/dp1"})
    assert settings is not None
    assert settings.instance == "llm/dp1"
    assert str(settings.socket) == "/run/kvquota/gpu0/agent.sock"
    assert settings.default_limit is None
    assert settings.reserve_bytes == DEFAULT_RESERVE_BYTES
    assert settings.host_fill is None


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("512M", 512 << 20),
        ("2G", 2 << 30),
        ("1.5GiB", 3 << 29),
        ("1kb", 1024),
        ("7 B", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    settings = Settings.read({"KVQUOTA": "1", "KVQUOTA_DEFAULT_LIMIT": text, "KVQUOTA_RESERVE_BYTES": text})
    assert settings is not None
    assert settings.default_limit == settings.reserve_bytes == size


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("KVQUOTA", "yes"),
        ("KVQUOTA_INSTANCE", "-x"),
        ("KVQUOTA_INSTANCE", "a/../b"),
        ("KVQUOTA_INSTANCE", "a" * 129),
        ("KVQUOTA_DEFAULT_LIMIT", "12Q"),
        ("KVQUOTA_DEFAULT_LIMIT", "-1"),
        ("KVQUOTA_DEFAULT_LIMIT", "99999999T"),
        ("KVQUOTA_DEFAULT_LIMIT", "512iB"),
        ("KVQUOTA_RESERVE_BYTES", "1.5.5G"),
        ("KVQUOTA_RESERVE_BYTES", "1.5"),
        ("KVQUOTA_HOST_FILL", "256"),
        ("KVQUOTA_HOST_FILL", "ff"),
    ],
)
def test_a_bad_value_is_named(variable: str, value: str) -> None:
    with pytest.raises(SettingError) as caught:
        Settings.read({"KVQUOTA": "1", variable: value})
    assert variable in str(caught.value)
    assert value in str(caught.value)
