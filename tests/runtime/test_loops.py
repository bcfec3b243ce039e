"""Event loops of workers."""

import asyncio
import sys

import pytest

from djqueue.runtime.loops import new_loop, run_loop


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


async def raises_in_a_task(error):
    async def child():
        raise error

    await asyncio.wait([asyncio.create_task(child())])


async def raises_in_a_callback(error):
    def callback():
        raise error

    asyncio.get_running_loop().call_soon(callback)
    await asyncio.sleep(0)


@pytest.mark.parametrize("raises", [raises_in_a_task, raises_in_a_callback])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_loop_goes_on_after_a_task_or_callback_raised_what_stops_asyncio(raises, kind):
    error, noted = kind("stray"), []

    async def main():
        await raises(error)
        await asyncio.sleep(0)
        return "done"

    assert run_loop(main(), noted.append) == "done"
    assert noted == [error]


def test_loop_goes_on_after_a_task_has_stopped_it():
    noted = []

    async def main():
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0.001)
        return "done"

    assert run_loop(main(), noted.append) == "done"
    assert [type(error) for error in noted] == [RuntimeError]


def test_loop_raises_what_its_main_coroutine_raises():
    async def main():
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        run_loop(main(), pytest.fail)
