import sys
import threading
from types import ModuleType

import pytest

from dagexec.scheduler.run import intra_op


@pytest.fixture(autouse=True)
def no_other_demands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nets of other tests that wait for the garbage collector demand nothing meanwhile."""
    monkeypatch.setattr(intra_op, "_demands", {})
    monkeypatch.setattr(intra_op, "_before", [])


def blas_threads() -> set[int]:
    controllers = intra_op.ThreadpoolController().select(user_api="blas").lib_controllers
    return {controller.num_threads for controller in controllers}


def test_the_smallest_demand_is_in_force_and_the_setting_from_before_comes_back() -> None:
    before = blas_threads()
    two = intra_op.BlasThreadLimit(2)
    assert blas_threads() == {2}
    one = intra_op.BlasThreadLimit(1)
    assert blas_threads() == {1}
    one.release()
    one.release()
    assert blas_threads() == {2}
    two.release()
    assert blas_threads() == before


def test_no_threads_at_all_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 intra-op thread"):
        intra_op.BlasThreadLimit(0)


def test_garbage_collected_while_a_demand_is_made_does_not_block_the_thread() -> None:
    demand = intra_op.BlasThreadLimit(1)

    def release_inside() -> None:
        with intra_op._lock:
            demand.release()

    thread = threading.Thread(target=release_inside, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


def test_libraries_are_looked_for_once_and_again_after_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    intra_op.BlasThreadLimit(1).release()
    looked: list[int] = []
    find = intra_op.ThreadpoolController
    monkeypatch.setattr(intra_op, "ThreadpoolController", lambda: looked.append(1) or find())
    intra_op.BlasThreadLimit(1).release()
    assert not looked
    monkeypatch.setitem(sys.modules, "imported_since", ModuleType("imported_since"))
    intra_op.BlasThreadLimit(1).release()
    assert looked == [1]


def test_a_demand_of_any_thread_is_in_force() -> None:
    intra_op.BlasThreadLimit(1).release()  # this thread was the first to set a number
    found: list[set[int]] = []

    def demand() -> None:
        for threads in (1, 2):
            made = intra_op.BlasThreadLimit(threads)
            found.append(blas_threads())
            made.release()

    thread = threading.Thread(target=demand)
    thread.start()
    thread.join(30)
    assert found == [{1}, {2}]
