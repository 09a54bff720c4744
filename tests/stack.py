#!/usr/bin/env python3
"""The deepest stack of an object file, from the call graph that gcc wrote for it.

  tests/stack.py FILE.ci          prints the deepest: bytes, tab, the functions on the way
  tests/stack.py --each FILE.ci   prints that for each function that nobody calls, deepest first

gcc -fstack-usage -fcallgraph-info=su writes FILE.ci.  Functions without a body there (memcpy)
count as 0.  A call through a pointer goes to the deepest function that is private (nbdi_) and
called by nobody, a hook; where there is none, or from a hook, it counts as 0.  A recursion and
a frame without a bound are errors.
"""

import re
import sys

NODE = re.compile(r'^node: \{ title: "([^"]*)" label: "([^"]*)"')
EDGE = re.compile(r'^edge: \{ sourcename: "([^"]*)" targetname: "([^"]*)"')
FRAME = re.compile(r"(\d+) bytes \((\w+)")
INDIRECT = "__indirect_call"


class Unbounded(Exception):
    """There is no deepest stack."""


def short(title):
    return title.rsplit(":", 1)[-1]


class Graph:
    def __init__(self, lines):
        self.frames = {}
        self.calls = {}
        self.known = {}  # what walk has found
        called = set()
        for line in lines:
            node, edge = NODE.match(line), EDGE.match(line)
            if node:
                self.add_node(*node.groups())
            elif edge:
                self.calls.setdefault(edge[1], set()).add(edge[2])
                called.add(edge[2])
        self.roots = [name for name in self.frames if name not in called]
        self.hooks = [name for name in self.roots if short(name).startswith("nbdi_")]

    def add_node(self, title, label):
        frame = FRAME.search(label)
        if not frame:
            return
        if frame[2] != "static":
            raise Unbounded(f"{short(title)} has a frame that is {frame[2]}")
        self.frames[title] = int(frame[1])

    def targets(self, name, in_hook):
        """The functions that `name` may call."""
        for target in sorted(self.calls.get(name, ())):
            if target != INDIRECT:
                yield target, in_hook
            elif not in_hook:
                yield from ((hook, True) for hook in self.hooks)

    def walk(self, name, in_hook=False, above=()):
        """Bytes and names from `name` down, where it is deepest."""
        if name in above:
            way = ", ".join(map(short, (*above, name)))
            raise Unbounded(f"recursion: {way}")
        if name not in self.frames:
            return 0, []
        if (name, in_hook) not in self.known:
            below = (
                self.walk(target, hook, (*above, name))
                for target, hook in self.targets(name, in_hook)
            )
            size, way = max(below, key=lambda found: found[0], default=(0, []))
            self.known[name, in_hook] = self.frames[name] + size, [short(name), *way]
        return self.known[name, in_hook]


def main(arguments):
    each = arguments[:1] == ["--each"]
    with open(arguments[-1], encoding="ascii") as file:
        graph = Graph(file)
    # A recursion that nobody outside enters has no root.
    deepest = {name: graph.walk(name, name in graph.hooks) for name in graph.frames}
    rows = sorted((deepest[root] for root in graph.roots), key=lambda found: -found[0])
    if not rows:
        raise Unbounded("no function")
    for size, way in rows if each else rows[:1]:
        print(f"{size}\t{', '.join(way)}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (Unbounded, OSError) as problem:
        sys.exit(f"stack.py: error: {problem}")
