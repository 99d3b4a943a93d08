from hypothesis import given, settings
from hypothesis import strategies as st

from slotkeeper.scheduler.state import FairQueue
from slotkeeper.scheduler.types import ClientId, RequestId


def filled(*requests):
    """Return a queue of requests that are named client + number."""
    queue = FairQueue()
    for request in requests:
        queue.add(RequestId(request), ClientId(request[0]))
    return queue


def drain(queue):
    order = []
    while len(queue):
        order.append(next(iter(queue)))
        queue.served(order[-1])
    return order


def test_clients_alternate_and_each_has_its_oldest_request_served_first():
    queue = filled("a1", "a2", "a3", "b1", "c1", "c2")
    assert list(queue) == ["a1", "b1", "c1", "a2", "c2", "a3"]
    assert drain(queue) == ["a1", "b1", "c1", "a2", "c2", "a3"]


def test_a_served_client_goes_behind_the_waiting_ones():
    queue = filled("a1", "a2", "b1")
    queue.served(RequestId("a1"))
    queue.add(RequestId("c1"), ClientId("c"))
    assert drain(queue) == ["b1", "a2", "c1"]


def test_a_request_that_leaves_delays_no_other_and_keeps_the_turn_of_its_client():
    queue = filled("a1", "a2", "b1")
    queue.discard(RequestId("a1"))
    queue.discard(RequestId("unknown"))
    assert "a1" not in queue
    assert drain(queue) == ["a2", "b1"]


def test_a_request_put_back_into_the_queue_is_the_next():
    queue = filled("a1", "b1", "b2")
    queue.served(RequestId("b1"))
    queue.put_back(RequestId("b1"), ClientId("b"))
    assert drain(queue) == ["b1", "a1", "b2"]


@given(st.lists(st.sampled_from("abcd"), max_size=40))
@settings(max_examples=100)
def test_no_client_is_served_twice_while_another_waits(clients):
    queue = filled(*(f"{client}{n}" for n, client in enumerate(clients)))
    waiting = {client: clients.count(client) for client in clients}
    served: dict[str, int] = dict.fromkeys(clients, 0)
    for request in drain(queue):
        others = [served[c] for c in waiting if c != request[0] and waiting[c] > served[c]]
        assert all(served[request[0]] <= count for count in others)
        served[request[0]] += 1
    assert served == waiting


@given(st.lists(st.sampled_from("abcd"), max_size=40))
@settings(max_examples=100)
def test_iteration_shows_each_request_once_in_the_order_of_service(clients):
    requests = [f"{client}{n}" for n, client in enumerate(clients)]
    queue = filled(*requests)
    seen = list(queue)
    assert sorted(seen) == sorted(requests)
    assert seen == drain(queue)
