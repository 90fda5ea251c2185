"""For tests of policies: engines that fail in one known way each, and counts of what happened.

::

    from composer.testing import FakeBackend, expect

    chain = [FakeBackend(fault="raises"), "aot_eager"]
    with expect(graphs=1, failed=1, served_by="aot_eager"):
        torch.compile(model, backend="composer", options={"chain": chain})(x)
"""

from composer.testing.expectation import expect
from composer.testing.fake import FakeBackend
from composer.testing.faults import Fault
from composer.testing.settling import settle

__all__ = ["FakeBackend", "Fault", "expect", "settle"]
