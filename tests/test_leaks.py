"""Nothing is left of a block once it has ended, whatever ended it. (`make soak` does this 1,000 times and draws it.)"""

import gc

import pytest
from leaking import ENGINES, FAULTS, WIDTH, allocated, block, live_tensors


@pytest.fixture
def no_collector():
    """What is left must go by reference counts alone, not when the collector comes round."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.usefixtures("no_collector")
def test_nothing_holds_model_outer_variable_or_graph_after_the_block(engine, fault):
    trace = block(ENGINES[engine](), fault)
    assert len(trace.refs) >= 4
    assert trace.alive == 0


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.usefixtures("no_collector")
def test_memory_and_live_tensors_stay_flat(engine):
    """Blocks that end in every way; a single graph that stayed behind would be seen in the count and in the bytes."""
    for fault in FAULTS:
        block(ENGINES[engine](), fault)
    tensors, heap = live_tensors(), allocated()
    for _ in range(3):
        for fault in FAULTS:
            block(ENGINES[engine](), fault)
    assert live_tensors() == tensors
    if heap is not None:
        weights = 8 * (3 * WIDTH + 2 * WIDTH + WIDTH + 1)  # bytes, once
        assert (allocated() or 0) - heap < 3 * weights  # so that no kind of end may leave a single set of them
