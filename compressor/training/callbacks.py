"""Callbacks of a training: what happens between its steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from transformers import TrainerCallback

from compressor.deltas.kinds.dense import Dense, gates_of, project, projected_of, require_moved, reseed, reset
from compressor.selection.growth import Grower
from compressor.training.divergence import Watch
from compressor.training.processes import agreed

SAVE_EVERY = 30.0
"""Seconds between the checkpoints of a training, ..."""
QUICK_SAVE = SAVE_EVERY / 20
"""... where writing one takes no more than these: a slower one puts off the next in proportion."""

CLIP = 1.0
"""Norm to which the gradients of all trainable parameters together are clipped."""


class Grow(TrainerCallback):
    """Callback that grows Ω between backward and the optimizer's step, then clips gradients as Trainer would have."""

    def __init__(self, grower: Grower, watch: Watch):
        self.grower, self.watch = grower, watch

    def on_step_begin(self, args, state, control, **kwargs):
        self.grower.before(state.global_step + 1)

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        step = state.global_step + 1
        self.grower.choose(step, getattr(optimizer, "optimizer", optimizer), partial(self.watch.require, step))
        self.watch.clip(step, CLIP)


class DenseLinks(TrainerCallback):
    """Callback for dense links: seeds their random draws, fixes positions after `first` steps, thins clipped gradients."""

    def __init__(self, links: Sequence[Dense], watch: Watch, first: int):
        self.links, self.watch, self.first = links, watch, first

    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        reseed(self.links, self.watch.schedule.seed, state.global_step)
        projected, step = projected_of(self.links), state.global_step
        if projected and step == self.first:
            self.watch.require_trained(step)
            require_moved(projected, step)
            project(projected)
            if gates_of(self.links):
                optimizer.state.clear()  # a new training begins, without momentum of the removed positions
        elif projected and projected[0].renew and 0 < step < self.first and step % projected[0].renew == 0:
            reset(projected)

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        for link in self.links:
            link.thin()


class Save(TrainerCallback):
    """Callback that saves a checkpoint whenever `seconds` (SAVE_EVERY) have passed since the last, or more where that took
    longer than QUICK_SAVE, but none after the last step: a training resumed there would take another step."""

    def __init__(self, seconds: float | None = None):
        self.seconds = self.pause = SAVE_EVERY if seconds is None else seconds
        self.before = self.last = time.monotonic()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step < state.max_steps and agreed(lambda: time.monotonic() - self.last >= self.pause):
            control.should_save = True

    def on_log(self, args, state, control, **kwargs):
        self.before = time.monotonic()  # every step logs its loss right before it saves, after evaluations

    def on_save(self, args, state, control, **kwargs):
        self.last = time.monotonic()
        self.pause = self.seconds * max(1.0, (self.last - self.before) / QUICK_SAVE)


class Report(TrainerCallback):
    """Callback that reports every step and logged loss to the caller; after a resume it first reports the steps before."""

    def __init__(self, on_step: Callable[[str], None]):
        self.on_step, self.note = on_step, ""

    def on_train_begin(self, args, state, control, **kwargs):
        for _ in range(state.global_step):
            self.on_step("resumed")

    def on_step_end(self, args, state, control, **kwargs):
        self.on_step(self.note)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            self.note = f"loss {float(logs['loss']):.3f}"
