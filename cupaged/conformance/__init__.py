"""What every backend must compute: checks of each operation of backends/base.py, which run anywhere.

    for case in cases(["attention"]):
        case.run(open_subject("emu", "float16"))       # raises Mismatch, or what the backend raises

A check is a function `(subject, **values)` under the decorator `case.check`, which makes a case of every combination of
the values. Its oracle is written from the operation's docstring in float64, one number at a time where that is clearest,
and shares no code with a backend. Slots that no sequence owns hold NaN, table entries that are not in use hold -1, and
results lie inside larger arrays whose rim must stay as it was. A Subject is a backend with the types it stores: inputs
are numbers that these types hold exactly, so that only the rounding of results is allowed for.

`cupaged kernels check` and tests/test_conformance.py both run these cases.
"""

from cupaged.conformance import attention, kv_cache, rows, sampling  # noqa: F401  # importing registers their checks
from cupaged.conformance.case import Case, Mismatch, cases, failure, operations
from cupaged.conformance.parts import STORED_TYPES, Part, plan
from cupaged.conformance.subject import Subject, open_subject

__all__ = ["STORED_TYPES", "Case", "Mismatch", "Part", "Subject", "cases", "failure", "open_subject", "operations", "plan"]
