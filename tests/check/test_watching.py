"""Watchers are told of blocks, the innermost alone, and in their own thread."""

import threading

import torch
from torch import nn

import bilevel_plugin as bilevel
from bilevel_plugin.check.watching import watching


def open_block():
    with bilevel.inner(nn.Linear(2, 1), lambda m: m.weight.sum(), solver="gd", lr=0.1) as loop:
        return loop


def test_the_innermost_watcher_of_the_thread():
    outer, inner = [], []
    with watching(lambda block, loop: outer.append((block, loop))):
        loop = open_block()
        with watching(lambda block, loop: inner.append(loop)):
            open_block()
        thread = threading.Thread(target=open_block)
        thread.start()
        thread.join()
    open_block()
    assert len(inner) == 1
    ((block, found),) = outer
    assert found is loop
    assert isinstance(block._model, nn.Linear)


def test_nothing_is_watched_after_an_error():
    seen = []
    try:
        with watching(lambda *told: seen.append(told)):
            raise KeyError
    except KeyError:
        open_block()
    assert seen == []
    assert torch.is_grad_enabled()
