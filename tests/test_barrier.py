"""The barrier under stress: workers that are threads here die at any word they write, replacements
join, generations are published late; whoever is left must agree, and never wait for ever."""

from __future__ import annotations

import gc
import os
import queue
import random
import sys
import threading
import time
import traceback
from functools import partial

import pytest
import torch

from samestep.barrier import Barrier
from samestep.board import Board, Roster, Word
from samestep.exchange import Shape, Work
from samestep.exchange.shared_memory import SharedMemory
from samestep.lanes import Node, join, reduction, share
from samestep.processes import memory_file

SEATS, LANES, SHAPE = 3, 6, Shape(32, 4)
OPERATIONS, DEADLINE_S = 60, 30.0
STEPS = (Word.OWN, Word.WRITTEN, Word.SUMMED, Word.PASSED, Word.AGREED)


class Dead(BaseException):
    """What a killed thread does: nothing any more."""


class Mortal(Board):
    """A board whose writer may die at, or be late with, any word of the protocol."""

    def __init__(self, me, fd, draw, can_die):
        super().__init__(SEATS, me, fd)
        self.draw, self.can_die = draw, can_die

    def put(self, word, value):
        if word in STEPS:
            if self.draw.random() < 0.15:
                time.sleep(self.draw.uniform(0, 0.002))
            if self.draw.random() < 0.006 and self.can_die(self.me):
                raise Dead
        super().put(word, value)
        if word in STEPS and self.draw.random() < 0.006 and self.can_die(self.me):
            raise Dead


class Stage:
    """The launcher's side, and what the workers have come to."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.fd = memory_file(Board.bytes_needed(SEATS))
        self.memory = memory_file(SharedMemory.bytes_needed(SHAPE, LANES))
        self.board = Board(SEATS, fd=self.fd)
        self.lock = threading.Lock()
        self.live = {row: row for row in range(SEATS)}  # row → seat, of those with the state
        self.team = dict(self.live)  # and of those that the team counts on
        self.sinces: dict[int, int] = {}
        self.generation = self.rows = 0
        self.exits: queue.Queue = queue.Queue()
        self.states: dict[int, queue.Queue] = {}
        self.done: dict[int, list] = {}
        self.errors: list = []
        self.deaths = self.joins = 0
        self.threads = []

    def can_die(self, row):
        """Never the last one that has the state."""
        with self.lock:
            if row in self.live and len(self.live) == 1:
                return False
            self.live.pop(row, None)
            return True

    def publish(self):
        self.generation += 1
        rows = sorted(self.team, key=lambda row: self.team[row])
        seats = tuple(self.team[row] for row in rows)
        sinces = tuple(self.sinces.setdefault(row, self.generation) for row in rows)
        none = (0,) * len(rows)
        self.board.publish(Roster(self.generation, tuple(rows), seats, none, sinces))

    def is_over(self):
        """Whoever has the state has come to the end."""
        with self.lock:
            return set(self.live) <= set(self.done)

    def picture(self):
        """Who waits where, for the one who has to find out why."""
        frames = sys._current_frames()
        stacks = {
            t.name: "".join(traceback.format_stack(frames[t.ident])[-3:])
            for t in self.threads
            if t.ident in frames
        }
        words = {row: {w.name: self.board.get(row, w) for w in STEPS} for row in self.team}
        rosters = [self.board.roster(g) for g in range(1, self.generation + 1)][-4:]
        return f"waits for ever: {self.live} {self.team} {words} {rosters}\n{stacks}"

    def start(self, row, seat, joins):
        thread = threading.Thread(target=self.work, args=(row, seat, joins), daemon=True)
        self.threads.append(thread)
        thread.start()

    def run(self):
        self.publish()
        self.rows = SEATS
        for row in range(SEATS):
            self.start(row, row, False)
        until = time.monotonic() + DEADLINE_S
        while not self.is_over() and not self.errors:
            assert time.monotonic() < until, self.picture()
            try:
                row, event = self.exits.get(timeout=0.05)
            except queue.Empty:
                continue
            time.sleep(self.draw.uniform(0, 0.004))  # the kernel, the fork server, the launcher
            if event == "dead":
                self.deaths += 1
                seat = self.team.pop(row, None)
                if seat is None:
                    continue
                self.publish()
                with self.lock:
                    waiting = [
                        new for new in self.states if new in self.team and new not in self.live
                    ]
                age = self.sinces[row], row
                older = age < min((self.sinces[r], r) for r in self.live)
                for new in waiting if older else ():
                    self.states[new].put(None)  # who was to give them the state is lost
                if self.rows < 40:
                    self.states[self.rows] = queue.Queue()
                    self.start(self.rows, seat, True)
                    self.rows += 1
            elif event == "catch up":
                row, seat = row
                self.team[row] = seat
                self.publish()
        for state in self.states.values():
            state.put(None)
        for thread in self.threads:
            thread.join(0.1 if self.errors else None)
        self.board.close()
        os.close(self.fd)
        os.close(self.memory)
        gc.collect()  # what the threads have mapped

    def work(self, row, seat, joins):
        draw = random.Random(f"{row} {self.draw.random()}")
        board = Mortal(row, self.fd, draw, self.can_die)
        try:
            time.sleep(draw.uniform(0, 0.01))
            barrier = Barrier(board, board.roster() if joins else board.roster(1))
            if joins:
                self.exits.put(((row, seat), "catch up"))
                state = self.states[row].get(timeout=DEADLINE_S)
                if state is None:
                    raise Dead
                operation, generation = state
                barrier.enter(board.roster(generation), operation)
                with self.lock:
                    self.live[row] = seat
                    self.joins += 1
            self.train(barrier, row)
        except Dead:
            self.exits.put((row, "dead"))
        except BaseException as error:
            self.errors.append(error)

    def train(self, barrier, row):
        exchange = SharedMemory(
            barrier, SHAPE, LANES, self.memory, 0, torch.device("cpu"), lambda verdict: None
        )
        seen = []
        while barrier.operation < OPERATIONS:
            if barrier.joined is not None:  # a boundary
                rows = barrier.join()
                if row == barrier.roster.oldest:
                    for new in rows:
                        self.states[new].put((barrier.operation, barrier.roster.generation))
            operation = barrier.operation + 1
            runs = share(LANES, [1.0] * len(barrier.roster))

            def do(run, operation=operation):
                for lane in run:
                    flat = exchange.slot(lane)
                    flat.f32.fill_(operation * 100 + lane)
                    flat.f64.fill_(operation * 100 + lane)
                fold(exchange, run)

            do(runs[barrier.place])
            total = exchange.reduce(Work(runs, partial(reduction, lanes=LANES), do))
            expected = sum(operation * 100 + lane for lane in range(LANES))
            assert (total.f32 == expected).all(), (row, operation, total.f32, expected)
            assert (total.f64 == expected).all()
            seen.append(operation)
        self.done[row] = seen


def fold(exchange, run):
    """What `Tree` does, on slots alone."""
    stack: list[Node] = []
    for lane in run:
        for left, right in join(stack, Node(0, lane), LANES):
            exchange.slot(left.first).add_(exchange.slot(right.first))


@pytest.mark.parametrize("seed", range(24))
def test_whoever_is_left_goes_on_and_agrees(seed):
    stage = Stage(seed)
    stage.run()
    if stage.errors:
        raise stage.errors[0]
    assert stage.done, "somebody has come to the end"


def test_that_stress_is_stress():
    deaths = joins = 0
    for seed in range(100, 110):
        stage = Stage(seed)
        stage.run()
        assert not stage.errors
        deaths, joins = deaths + stage.deaths, joins + stage.joins
    assert deaths >= 20
    assert joins >= 10
