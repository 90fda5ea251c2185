"""OpenVINO without the correction of one fault that ends the process, also in a child process."""

from __future__ import annotations

from unittest import mock

from composer.backends.base import Build, BuildRequest
from composer.backends.openvino import OpenVinoEngine, corrections
from composer.backends.openvino.corrections.scalars import squeeze_to_scalars


class Uncorrected(OpenVinoEngine):
    """Ends the process at a product's one element that becomes a scalar."""

    def build(self, request: BuildRequest) -> Build:
        kept = tuple(each for each in corrections.ALWAYS if each is not squeeze_to_scalars)
        with mock.patch.object(corrections, "ALWAYS", kept):
            return super().build(request)
