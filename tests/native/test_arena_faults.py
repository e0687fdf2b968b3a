"""A driver call that fails, at every position: the books stay exact, and one error never fails the arena."""

from collections.abc import Iterator

import pytest
from kvquota.native import Arena, DriverError, FaultDriver

from tests.native.arenas import GRANULE, TIMEOUT, ask, done, two_tensors, wait_for
from tests.native.devices import Device
from tests.native.life import TRIES, Life

PAGE = 3 * GRANULE
# Calls that fail before a page goes that did not go at once: long enough to be looked at.
STAYS = 9


@pytest.fixture
def driver(device: Device) -> FaultDriver:
    return FaultDriver(device.driver)


@pytest.fixture
def arena(driver: FaultDriver, device: Device) -> Iterator[Arena]:
    arena = two_tensors(driver)
    yield arena
    arena.close()
    assert device.taken() == 0


def test_neighbours_are_mapped_and_unmapped_in_runs(arena: Arena, driver: FaultDriver) -> None:
    ask(arena, 4)
    arena.apply(1, [6, 1, 2, 3], [])
    assert (driver.calls("mem_map"), driver.calls("mem_set_access")) == (8, 4)
    arena.apply(2, [], [3, 2, 1])
    done(arena, 2)
    assert driver.calls("mem_unmap") == 2


def test_a_long_run_is_unmapped_in_steps(arena: Arena, driver: FaultDriver) -> None:
    ask(arena, 16)
    arena.apply(1, range(16), [])
    assert driver.calls("mem_set_access") == 2
    arena.apply(2, [], range(16))
    assert done(arena, 2).unmapped == 16
    # 32 and 64 MiB, 32 at a time.
    assert driver.calls("mem_unmap") == 3


@pytest.mark.parametrize(
    ("operation", "nth", "page"),
    [("mem_map", nth, page) for nth, page in enumerate([1, 2, 6, 1, 2, 6], 1)]
    + [("mem_set_access", nth, page) for nth, page in enumerate([1, 6, 1, 6], 1)],
)
def test_a_map_that_fails_anywhere_is_undone_and_the_unmaps_go_on(
    arena: Arena, driver: FaultDriver, device: Device, operation: str, nth: int, page: int
) -> None:
    ask(arena, 4)
    arena.apply(1, [0], [])
    driver.fail(operation, nth=nth, times=3, code=999, name="CUDA_ERROR_UNKNOWN")
    message = f"{operation} failed with CUDA_ERROR_UNKNOWN.*page {page}"
    with pytest.raises(DriverError, match=message) as caught:
        arena.apply(2, [6, 2, 1], [0])
    error = caught.value
    assert (error.operation, error.code, error.page) == (operation, 999, page)
    report = done(arena, 2)
    # The memory stays with the pages, as if they were mapped.
    assert (report.mapped, report.unmapped, report.created) == (4, 1, 4)
    assert (report.held_bytes, device.taken()) == (3 * PAGE, 3 * PAGE)
    assert [(fault.seq, fault.operation) for fault in report.faults] == 3 * [(2, operation)]
    assert {fault.page for fault in report.faults} == {1, 2, 6}
    with pytest.raises(ValueError, match="seq 2 after 2"):
        arena.apply(2, [], [])

    arena.apply(3, [], [1, 2, 6])
    report = done(arena, 3)
    assert (report.unmapped, report.held_bytes, device.taken(), report.faults) == (4, 0, 0, [])
    ask(arena, 7)
    arena.apply(4, [6, 2, 1], [])


@pytest.mark.parametrize("operation", ["mem_map", "mem_set_access"])
def test_a_map_is_tried_three_times(arena: Arena, driver: FaultDriver, operation: str) -> None:
    ask(arena, 1)
    driver.fail(operation, nth=2, times=2)
    arena.apply(1, [4], [])
    assert (arena.report().mapped, arena.report().faults) == (1, [])


def test_a_map_that_can_not_be_undone_is_unmapped_with_its_page(arena: Arena, driver: FaultDriver) -> None:
    ask(arena, 2)
    driver.fail("mem_map", nth=4, times=3)
    driver.fail("mem_unmap", nth=2, times=3)
    with pytest.raises(DriverError, match=r"mem_map.*page 8"):
        arena.apply(1, [3, 8], [])
    report = arena.report()
    faults = {(fault.page, fault.operation) for fault in report.faults}
    assert faults == {(3, "mem_map"), (8, "mem_map"), (8, "mem_unmap")}
    assert (report.created - report.mapped - report.dropped, report.held_bytes) == (0, 2 * PAGE)
    with pytest.raises(ValueError, match="page 8 can't be mapped"):
        arena.apply(2, [8], [])
    arena.apply(2, [], [8])
    report = done(arena, 2)
    assert [(fault.page, fault.operation) for fault in report.faults] == [(3, "mem_map")]
    assert (report.unmapped, report.held_bytes) == (1, PAGE)


def test_one_unmap_error_quarantines_its_page_alone(
    arena: Arena, driver: FaultDriver, device: Device
) -> None:
    ask(arena, 3)
    arena.apply(1, [0, 1, 2], [])
    # The run, then page 0, then page 1 three times; page 2 and the other tensor; page 1 again.
    driver.fail("mem_unmap", nth=1)
    driver.fail("mem_unmap", nth=3, times=3)
    driver.fail("mem_unmap", nth=8, times=STAYS - 3)
    arena.apply(2, [], [0, 1, 2])
    report = done(arena, 2)
    assert [(fault.seq, fault.page, fault.operation) for fault in report.faults] == [(2, 1, "mem_unmap")]
    assert (report.unmapped, report.held_bytes) == (2, PAGE)
    assert device.taken() == PAGE
    ask(arena, 5)
    arena.apply(3, [0, 2], [])
    with pytest.raises(ValueError, match="page 1 can't be mapped"):
        arena.apply(4, [1], [])
    with pytest.raises(ValueError, match="page 1 can't be unmapped"):
        arena.apply(4, [], [1])
    # It is tried again by itself.
    report = wait_for(arena, lambda report: report.unmapped == 3)
    assert (report.faults, report.held_bytes) == ([], 2 * PAGE)
    ask(arena, 6)
    arena.apply(4, [1], [])


def test_a_page_that_does_not_go_is_tried_again_for_a_while(arena: Arena, driver: FaultDriver) -> None:
    ask(arena, 1)
    arena.apply(1, [0], [])
    driver.fail("mem_unmap", times=STAYS)
    arena.apply(2, [], [0])
    report = done(arena, 2)
    assert (report.unmapped, report.held_bytes) == (0, PAGE)
    report = wait_for(arena, lambda report: report.unmapped == 1)
    assert (report.faults, report.held_bytes) == ([], 0)
    assert driver.calls("mem_unmap") > STAYS


def test_an_unmap_is_tried_three_times(arena: Arena, driver: FaultDriver) -> None:
    ask(arena, 1)
    arena.apply(1, [0], [])
    driver.fail("mem_unmap", times=2)
    arena.apply(2, [], [0])
    report = done(arena, 2)
    assert (report.unmapped, report.faults) == (1, [])


@pytest.mark.parametrize(
    ("operation", "nth"), [("mem_release", 1), ("mem_release", 2), ("event_synchronize", 1)]
)
def test_memory_that_does_not_go_is_never_counted_as_gone(
    arena: Arena, driver: FaultDriver, operation: str, nth: int
) -> None:
    ask(arena, 1)
    arena.apply(1, [9], [])
    driver.fail(operation, nth=nth, times=STAYS)
    arena.apply(2, [], [9])
    report = done(arena, 2)
    assert [(fault.page, fault.operation) for fault in report.faults] == [(9, operation)]
    assert (report.unmapped, report.held_bytes) == (0, PAGE)
    report = wait_for(arena, lambda report: report.unmapped == 1)
    assert (report.faults, report.held_bytes) == ([], 0)


def test_a_fence_that_can_not_be_made_is_made_later(arena: Arena, driver: FaultDriver) -> None:
    ask(arena, 2)
    arena.apply(1, [0], [])
    driver.fail("event_record", times=3 + STAYS)
    arena.apply(2, [1], [0])
    report = done(arena, 2)
    assert [(fault.page, fault.operation) for fault in report.faults] == [(0, "event_record")]
    assert (report.mapped, report.unmapped, report.held_bytes) == (2, 0, 2 * PAGE)
    report = wait_for(arena, lambda report: report.unmapped == 1)
    assert (report.faults, report.held_bytes) == ([], PAGE)


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_out_of_memory_while_creating_is_fewer_credits_and_no_fault(
    arena: Arena, driver: FaultDriver, device: Device, nth: int
) -> None:
    driver.fail("mem_create", nth=nth, code=2, name="CUDA_ERROR_OUT_OF_MEMORY")
    arena.ask(2, 0)
    report = wait_for(arena, lambda report: report.created + report.refused == 2)
    created = (nth - 1) // 2
    assert (report.created, report.faults, report.held_bytes) == (created, [], created * PAGE)
    assert device.taken() == created * PAGE
    arena.ask(2 + report.refused, 0)
    assert arena.wait_credits(2, TIMEOUT) == 2


def test_another_error_while_creating_is_refused_and_told(arena: Arena, driver: FaultDriver) -> None:
    driver.fail("mem_create", nth=2, times=3, code=5)
    arena.ask(2, 0)
    report = wait_for(arena, lambda report: report.refused > 0)
    assert (report.created, report.refused, report.held_bytes) == (0, 2, 0)
    assert [(fault.page, fault.operation) for fault in report.faults] == [(-1, "mem_create")]
    arena.ask(3, 0)
    report = wait_for(arena, lambda report: report.created == 1)
    assert (report.refused, report.faults) == (2, [])


def test_a_credit_that_can_not_be_released_stays_accounted(arena: Arena, driver: FaultDriver) -> None:
    ask(arena, 2)
    driver.fail("mem_release", times=STAYS)
    arena.ask(2, 1)
    report = wait_for(arena, lambda report: report.dropped == 1)
    assert [(fault.page, fault.operation) for fault in report.faults] == [(-1, "mem_release")]
    assert (report.quarantined_credits, report.held_bytes) == (1, 2 * PAGE)
    # It is tried again by itself.
    report = wait_for(arena, lambda report: report.quarantined_credits == 0)
    assert (report.faults, report.held_bytes) == ([], PAGE)


def test_a_drop_that_crosses_a_refusal_does_not_fail_the_command(arena: Arena, driver: FaultDriver) -> None:
    driver.fail("mem_create", nth=5, code=12, name="ENOMEM")
    arena.ask(5, 0)
    wait_for(arena, lambda report: report.refused == 3)
    # The leader, not knowing, drops the three and counts on the two it saw.
    arena.ask(5, 3)
    report = wait_for(arena, lambda report: report.dropped == 3)
    assert (report.created, report.refused, report.held_bytes) == (5, 0, 2 * PAGE)
    arena.apply(1, [0, 1], [])


def test_close_tries_everything_and_names_what_failed(device: Device) -> None:
    driver = FaultDriver(device.driver)
    arena = two_tensors(driver)
    ask(arena, 2)
    arena.apply(1, [0, 4], [])
    driver.fail("mem_unmap", times=3)
    with pytest.raises(DriverError, match=r"mem_unmap.*page 0"):
        arena.close()
    assert device.taken() == PAGE
    # What is left goes with another call.
    arena.close()
    assert device.taken() == 0
    arena.close()


def test_unknown_operations_are_refused(driver: FaultDriver) -> None:
    with pytest.raises(ValueError, match="'mem_mapp' is none of address_free, "):
        driver.fail("mem_mapp")
    with pytest.raises(ValueError, match="count from 1"):
        driver.fail("mem_map", nth=0)


OPERATIONS = [
    "address_reserve",
    "address_free",
    "mem_create",
    "mem_release",
    "mem_map",
    "mem_unmap",
    "mem_set_access",
    "event_record",
    "event_synchronize",
    "event_destroy",
]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_whatever_fails_wherever_nothing_is_lost(device: Device, operation: str) -> None:
    """As test_cuda_faults.py, for the calls of the table on any driver."""
    driver = FaultDriver(device.driver)
    Life(two_tensors(driver, 4), device.taken).live()
    positions = driver.calls(operation)
    assert positions > 0
    for times in (1, TRIES):
        for nth in range(1, positions + 1):
            driver = FaultDriver(device.driver)
            driver.fail(operation, nth, times)
            try:
                arena = two_tensors(driver, 4)
            except DriverError:
                assert (operation, times) == ("address_reserve", TRIES)
            else:
                Life(arena, device.taken).live()
            assert driver.calls(operation) >= nth
            assert device.taken() == 0
