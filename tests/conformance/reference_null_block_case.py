"""The reference engine with a null block: its first page is a floor."""

from tests.conformance.case import EngineCase
from tests.conformance.reference_case import ReferenceCase

CASE: EngineCase = ReferenceCase("reference with a null block", floor=1)
