"""Helpers for tests of policies and engines: fake engines, counts, a check of the contract.

::

    from composer.testing import FakeBackend, expect

    chain = [FakeBackend(fault="raises"), "aot_eager"]
    with expect(graphs=1, failed=1, served_by="aot_eager"):
        torch.compile(model, backend="composer", options={"chain": chain})(x)
"""

from composer.testing.contract import BackendCheck, check_backend
from composer.testing.expectation import expect, settle
from composer.testing.fake import FakeBackend
from composer.testing.faults import Fault

__all__ = ["BackendCheck", "FakeBackend", "Fault", "check_backend", "expect", "settle"]
