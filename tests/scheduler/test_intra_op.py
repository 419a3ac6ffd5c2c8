import pytest

from dagexec.scheduler import intra_op


def blas_threads() -> set[int]:
    controllers = intra_op.ThreadpoolController().select(user_api="blas").lib_controllers
    return {controller.num_threads for controller in controllers}


def test_the_smallest_demand_is_in_force_and_the_setting_from_before_comes_back() -> None:
    before = blas_threads()
    two = intra_op.Demand(2)
    assert blas_threads() == {2}
    one = intra_op.Demand(1)
    assert blas_threads() == {1}
    one.release()
    one.release()
    assert blas_threads() == {2}
    two.release()
    assert blas_threads() == before


def test_no_threads_at_all_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 intra-op thread"):
        intra_op.Demand(0)
