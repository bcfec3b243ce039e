"""Event loops of workers."""

import asyncio
import sys

import pytest

from djqueue.runtime.loops import new_loop


def test_event_loop_is_uvloop_if_installed():
    uvloop = pytest.importorskip("uvloop")

    loop = new_loop()

    assert isinstance(loop, uvloop.Loop)
    loop.close()


def test_event_loop_is_asyncio_without_uvloop(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    monkeypatch.delitem(sys.modules, "uvloop", raising=False)

    loop = new_loop()

    assert isinstance(loop, asyncio.SelectorEventLoop)
    loop.close()
