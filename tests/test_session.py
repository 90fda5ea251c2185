"""The memory of a process: what is counted when it begins anew."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest

import composer
from composer import session


def test_no_reset_is_lost_that_another_thread_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.compiler.reset()`` may come in the middle of ``composer.reset()``."""
    before = session.current().resets
    usual = copy.copy
    others = []

    def copying(value: Any) -> Any:
        copied = usual(value)
        other = threading.Thread(target=session.count_reset)
        other.start()
        other.join(0.2)  # it may have to wait until the session is replaced
        others.append(other)
        return copied

    monkeypatch.setattr(session.copy, "copy", copying)
    composer.reset()
    others[0].join()
    assert session.current().resets == before + 2
