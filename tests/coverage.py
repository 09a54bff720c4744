#!/usr/bin/env python3
"""Coverage of nbd.h by a set of programs, and whether each miss is accounted for.

    coverage.py PROFILE LIST PROGRAM...

PROFILE is what llvm-profdata merged, LIST is tests/coverage.md.  Each program has its own
copy of nbd.h, maybe with other macros: what counts is the union by place in the source.
Prints one line per rule as the tests do, and each miss as nbd.h:LINE.  The working
directory holds the nbd.h that the programs were built from.
"""
import json
import os
import re
import subprocess
import sys

HEADER = 'nbd.h'
BARS = {'lines': 100.0, 'branches': 97.0, 'MC/DC': 95.0}
LLVM_COV = os.environ.get('LLVM_COV', 'llvm-cov-19')
BRANCH = 4  # kind of an entry of llvm-cov's regions


def export(program, profile):
    command = [LLVM_COV, 'export', '-skip-expansions', '-instr-profile=' + profile, program]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=True)
    return json.loads(done.stdout)['data'][0]


def is_header(path):
    return os.path.normpath(path) == os.path.abspath(HEADER)


class Union:
    """What was seen in any of the programs, by place in the header."""

    def __init__(self, source):
        self.source = source
        self.lines = {}     # line: executed
        self.branches = {}  # place: [true taken, false taken]
        self.mcdc = {}      # place of a decision: {index of a condition: shown independent}
        self.functions = {}  # name: (first line, last line)

    def add(self, data):
        for one in data['files']:
            if is_header(one['filename']):
                self.add_lines(one['segments'])
        for function in data['functions']:
            names = function['filenames']
            if is_header(names[0]):
                self.add_function(function, [is_header(name) for name in names])

    def add_lines(self, segments):
        by_line = {}
        for segment in segments:
            by_line.setdefault(segment[0], []).append(segment)
        wrapped = None
        for line in range(segments[0][0], segments[-1][0] + 1):
            here = by_line.get(line, [])
            count = line_count(here, wrapped)
            if count is not None and not self.source.lines[line - 1].startswith('#'):
                self.lines[line] = self.lines.get(line, False) or count > 0
            if here:
                wrapped = here[-1]

    def add_function(self, function, in_header):
        name = function['name'].split(':')[-1]
        region = function['regions'][0]
        self.functions[name] = (region[0], region[2])
        for entry in function['branches']:
            if in_header[entry[6]] and entry[8] != 0:
                taken = self.branches.setdefault(tuple(entry[:4]), [False, False])
                taken[0] |= entry[4] > 0
                taken[1] |= entry[5] > 0
        for entry in function.get('mcdc_records', []):
            shown = self.mcdc.setdefault(tuple(entry[:4]), {})
            for i, value in enumerate(entry[6]):
                shown[i] = shown.get(i, False) or value

    def drop_constants(self):
        """What a build cuts or has is a constant of it, and no condition: NBDI_TEXTS, say."""
        for place in list(self.branches):
            if is_constant(self.source.text(place)):
                del self.branches[place]
        for place, shown in self.mcdc.items():
            for i, operand in enumerate(re.split(r'&&|\|\|', self.source.text(place))):
                if is_constant(operand):
                    shown.pop(i, None)

    def function_at(self, line):
        fit = [(last - first, name) for name, (first, last) in self.functions.items()
               if first <= line <= last]
        return min(fit)[1] if fit else '-'


def is_constant(text):
    return re.fullmatch(r'NBDI_[A-Z]+', text.strip(' !()'))


def starts(segment):
    return segment[3] and segment[4] and not segment[5]


def line_count(here, wrapped):
    """How often a line ran; None if there is no code on it.  As llvm-cov counts."""
    started = [segment for segment in here if starts(segment)]
    skipped = here and not here[0][3] and here[0][4]
    if skipped or not (started or (wrapped and wrapped[3])):
        return None
    counts = [segment[2] for segment in started]
    if wrapped and wrapped[3]:
        counts.append(wrapped[2])
    return max(counts)


class Source:
    def __init__(self):
        with open(HEADER, encoding='utf-8') as source:
            self.lines = source.read().split('\n')

    def text(self, place):
        first, column, last, end = place
        if first == last:
            text = self.lines[first - 1][column - 1:end - 1]
        else:
            text = ' '.join([self.lines[first - 1][column - 1:]] + self.lines[first:last - 1]
                            + [self.lines[last - 1][:end - 1]])
        return ' '.join(text.split())


def misses(union, source):
    """Yields (line, function, text, what)."""
    for line, ran in sorted(union.lines.items()):
        if not ran:
            yield line, union.function_at(line), source.lines[line - 1].strip(), 'never runs'
    for place, taken in sorted(union.branches.items()):
        for i, what in enumerate(('never true', 'never false')):
            if not taken[i]:
                yield place[0], union.function_at(place[0]), source.text(place), what
    for place, shown in sorted(union.mcdc.items()):
        for i, value in shown.items():
            if not value:
                yield (place[0], union.function_at(place[0]), source.text(place),
                       'condition %d not independent' % (i + 1))


def read_list(path):
    """The misses that have a reason: (function, text, what)."""
    reasons, function = set(), ''
    with open(path, encoding='utf-8') as source:
        for line in source:
            heading = re.match(r'### `(.+)`$', line.rstrip())
            item = re.match(r'- `(.+)` ([a-z0-9 ]+): \S', line)
            if heading:
                function = heading.group(1)
            elif item:
                reasons.add((function, item.group(1), item.group(2)))
    return reasons


def percent(good, total):
    return 100.0 * good / total if total else 0.0


def figures(union):
    taken = [one for pair in union.branches.values() for one in pair]
    shown = [one for row in union.mcdc.values() for one in row.values()]
    ran = list(union.lines.values())
    return [('lines', sum(ran), len(ran)), ('branches', sum(taken), len(taken)),
            ('MC/DC', sum(shown), len(shown))]


def judge_bars(union):
    failed = 0
    for name, good, total in figures(union):
        share = percent(good, total)
        rule = 'coverage_%s' % name.lower().replace('/', '')
        text = '%s %.2f %%: %d of %d' % (name, share, good, total)
        print('# ' + text)
        if share >= BARS[name]:
            print('ok ' + rule)
        else:
            print('FAIL %s: %s, the bar is %.0f %%' % (rule, text, BARS[name]))
            failed = 1
    return failed


def is_explained(key, reasons):
    """Listed, or a decision around a condition that is listed."""
    function, text, what = key
    return key in reasons or (what.startswith('condition') and any(
        one[0] == function and one[1] in text for one in reasons))


def judge_misses(union, reasons):
    unknown, seen = [], set()
    for line, function, text, what in misses(union, union.source):
        key = (function, text, what)
        known = is_explained(key, reasons)
        print('# %s %s:%d: %s: `%s` %s' % ('miss' if known else 'unexplained miss', HEADER, line,
                                           function, text, what))
        seen.add(key)
        if not known:
            unknown.append('%s:%d' % (HEADER, line))
    stale = ['%s `%s` %s' % key for key in sorted(reasons - seen)]
    return (report('coverage_misses_are_explained', unknown)
            | report('coverage_list_has_no_entry_without_a_miss', stale))


def report(rule, wrong):
    if wrong:
        print('FAIL %s: %d: %s' % (rule, len(wrong), ', '.join(wrong[:10])))
        return 1
    print('ok ' + rule)
    return 0


def conditionals():
    """Each branch of #if in the implementation: (line, directive, lines of its own)."""
    stack, found = [], []
    with open(HEADER, encoding='utf-8') as source:
        for number, line in enumerate(source, 1):
            directive = re.match(r'#\s*(if|ifdef|ifndef|elif|else|endif)\b', line)
            if not directive:
                for branch in stack:
                    branch[2].append(number)
                continue
            if directive.group(1) in ('elif', 'else', 'endif'):
                found.append(stack.pop())
            if directive.group(1) != 'endif':
                stack.append((number, line.strip(), []))
    return found


def has_code(line):
    return line.rstrip().endswith((';', '{', '}')) and not line.startswith('#')


def print_uncompiled(union):
    """Branches of #if in functions, or with whole functions, that no program compiles."""
    source = union.source
    first = min(union.lines)
    for number, directive, lines in sorted(conditionals()):
        code = [n for n in lines if has_code(source.lines[n - 1])]
        if number > first and code and not any(n in union.lines for n in lines):
            print('# not compiled %s:%d: %s, %d lines of code'
                  % (HEADER, number, directive, len(code)))


def main(arguments):
    profile, path, programs = arguments[0], arguments[1], arguments[2:]
    union = Union(Source())
    for program in programs:
        union.add(export(program, profile))
    union.drop_constants()
    print_uncompiled(union)
    failed = judge_misses(union, read_list(path))
    return judge_bars(union) | failed


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
