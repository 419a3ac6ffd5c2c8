import sys
import threading
from types import ModuleType

import pytest
from threadpoolctl import ThreadpoolController

from dagexec.scheduler.run import blas_thread


@pytest.fixture(autouse=True)
def no_other_demands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nets of other tests that wait for the garbage collector demand nothing meanwhile."""
    monkeypatch.setattr(blas_thread, "_demands", set())
    monkeypatch.setattr(blas_thread, "_before", [])


def blas_threads() -> set[int]:
    controllers = ThreadpoolController().select(user_api="blas").lib_controllers
    return {controller.num_threads for controller in controllers}


def set_blas_threads(count: int) -> None:
    for library in blas_thread._libraries():
        blas_thread._set(library, count)


def test_one_thread_is_in_force_until_the_last_demand_is_withdrawn_and_then_the_setting_from_before() -> None:
    found = blas_threads()
    before = {max(found) + 1}
    set_blas_threads(*before)
    first, second = blas_thread.OneBlasThread(), blas_thread.OneBlasThread()
    assert blas_threads() == {1}
    first.release()
    first.release()
    assert blas_threads() == {1}
    second.release()
    assert blas_threads() == before
    set_blas_threads(max(found))


def test_garbage_collected_while_a_demand_is_made_does_not_block_the_thread() -> None:
    demand = blas_thread.OneBlasThread()

    def release_inside() -> None:
        with blas_thread._lock:
            demand.release()

    thread = threading.Thread(target=release_inside, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


def test_libraries_are_looked_for_once_and_again_after_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    blas_thread.OneBlasThread().release()
    looked: list[int] = []
    find = ThreadpoolController
    monkeypatch.setattr(blas_thread.threadpoolctl, "ThreadpoolController", lambda: looked.append(1) or find())
    blas_thread.OneBlasThread().release()
    assert not looked
    monkeypatch.setitem(sys.modules, "imported_since", ModuleType("imported_since"))
    blas_thread.OneBlasThread().release()
    assert looked == [1]


def test_a_demand_of_any_thread_is_in_force() -> None:
    blas_thread.OneBlasThread().release()  # this thread was the first to set a number
    found: list[set[int]] = []

    def demand() -> None:
        made = blas_thread.OneBlasThread()
        found.append(blas_threads())
        made.release()

    thread = threading.Thread(target=demand)
    thread.start()
    thread.join(30)
    assert found == [{1}]
