"""The queue of requests: priority, order of arrival, nobody waits for ever, and entries that left leave no trace."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagexec.executor.requests.call import Call
from dagexec.executor.requests.queue import MAX_OVERTAKEN, RequestQueue
from dagexec.executor.requests.request import Request


def request(priority: int = 0) -> Request:
    return Request({}, call=Call(priority=priority), notify=lambda: None)


def drained(queue: RequestQueue) -> list[Request]:
    found = []
    while (taken := queue.pop()) is not None:
        found.append(taken)
    return found


def test_the_highest_priority_goes_first_and_equal_ones_in_order_of_arrival() -> None:
    queue = RequestQueue()
    requests = [request(priority) for priority in (0, 5, -1, 5, 0)]
    for one in requests:
        queue.push(one)
    assert drained(queue) == [requests[index] for index in (1, 3, 0, 4, 2)]
    assert queue.pop() is None


def test_a_request_overtaken_so_often_goes_next_whatever_its_priority() -> None:
    queue = RequestQueue()
    patient, second = request(-10), request(-10)
    queue.push(patient)
    queue.push(second)
    order = []
    for _ in range(3 * MAX_OVERTAKEN):
        queue.push(request(1))
        order.append(queue.pop())
    assert order.index(patient) == MAX_OVERTAKEN
    assert order.index(second) == 2 * MAX_OVERTAKEN + 1


class Reference:
    """The same queue as a list, after its documentation."""

    def __init__(self) -> None:
        self.waiting: list[Request] = []
        self.overtaken = 0

    def pop(self) -> Request | None:
        if not self.waiting:
            return None
        oldest = self.waiting[0]
        taken = oldest if self.overtaken >= MAX_OVERTAKEN else max(self.waiting, key=lambda one: one.call.priority)
        self.remove(taken, taking=True)
        return taken

    def remove(self, one: Request, *, taking: bool = False) -> None:
        if one is self.waiting[0]:
            self.overtaken = 0
        elif taking:
            self.overtaken += 1
        self.waiting.remove(one)


@given(st.lists(st.tuples(st.sampled_from(["push", "push", "pop", "remove"]), st.integers(-2, 2)), max_size=200))
def test_any_history_gives_what_a_plain_list_gives(history: list[tuple[str, int]]) -> None:
    queue, reference = RequestQueue(), Reference()
    for action, number in history:
        if action == "push":
            one = request(number)
            queue.push(one)
            reference.waiting.append(one)
        elif action == "pop":
            assert queue.pop() is reference.pop()
        elif reference.waiting:
            one = reference.waiting[number % len(reference.waiting)]
            queue.remove(one)
            reference.remove(one)
        assert len(queue) == len(reference.waiting)
        assert all(one.queue is queue for one in reference.waiting)
    assert drained(queue) == [reference.pop() for _ in range(len(reference.waiting))]


def leave_by_removal(queue: RequestQueue, one: Request) -> None:
    queue.remove(one)


def leave_in_turn(queue: RequestQueue, one: Request) -> None:
    del one
    queue.pop()


@pytest.mark.parametrize("leave", [leave_by_removal, leave_in_turn])
def test_requests_that_left_take_no_memory_while_another_goes_on_waiting(
    leave: Callable[[RequestQueue, Request], None],
) -> None:
    queue = RequestQueue()
    queue.push(request(-1))
    for _ in range(10_000):
        one = request()
        queue.push(one)
        leave(queue, one)
    assert len(queue._heap) < 100
    assert len(queue) <= 1


def test_clearing_gives_all_oldest_first() -> None:
    queue = RequestQueue()
    requests = [request(priority) for priority in (0, 2, 1)]
    for one in requests:
        queue.push(one)
    assert queue.clear() == requests
    assert (len(queue), queue.pop()) == (0, None)
    assert all(one.queue is None for one in requests)


def test_a_request_lets_go_of_its_result_when_it_is_asked_for() -> None:
    one = request()
    outputs = one.result = {"y": np.zeros(1)}
    assert one.outcome() is outputs
    assert one.result is None


def test_a_request_lets_go_of_its_error_when_it_is_asked_for() -> None:
    one = request()
    one.error = ValueError("once")
    with pytest.raises(ValueError, match="once"):
        one.outcome()
    assert one.error is None


def test_after_clearing_nobody_has_been_overtaken() -> None:
    queue = RequestQueue()
    queue.push(request())
    for _ in range(MAX_OVERTAKEN):
        queue.push(request(1))
        queue.pop()
    queue.clear()
    queue.push(request())
    urgent = request(1)
    queue.push(urgent)
    assert queue.pop() is urgent
