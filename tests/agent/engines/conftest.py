"""What the tests of adapters share."""

import importlib

import pytest


@pytest.fixture(scope="session")
def vllm_imported() -> None:
    """vLLM warns while it is imported, and warnings are errors here."""
    importlib.import_module("tests.support.vllm_imports")
