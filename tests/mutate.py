#!/usr/bin/python3
"""Breaks nbd.h in a few hundred places, one at a time, and shows that the tests notice.

    tests/mutate.py           from the top directory
    MUTANTS=30                so many places; 0: all
    SEED=1                    which ones
    ONLY='nbdi_uri_* nbd_fit'  only in these functions
    TESTS='test_uri test_walk'  by these only; all that the tree has without it
    JOBS=2                    tests at once

One copy of nbd.h holds all mutants, each behind a number that the environment selects, so
each test program is built once.  A first run tells which mutants a program reaches.  A
mutant is killed if a test fails, crashes or hangs.  Every one that survives must stand in
tests/mutation/survivors.md with the reason.  build/mutation.txt has what became of each.
"""
import bisect
import collections
import concurrent.futures
import fnmatch
import glob
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import threading
import time

from clang import cindex
from clang.cindex import CursorKind as Kind, TypeKind

BAR = 95.0
SURVIVORS = 'tests/mutation/survivors.md'
COMPARE = {'<': '<=', '<=': '<', '>': '>=', '>=': '>', '==': '!=', '!=': '=='}
SAME = {'<': ' + 1', '>=': ' + 1', '>': ' - 1', '<=': ' - 1'}  # of the constant to the right
LOGIC = {'&&': '||', '||': '&&'}
SIGN = {'+': '-', '-': '+'}
INTEGERS = {TypeKind.INT, TypeKind.UINT, TypeKind.LONG, TypeKind.ULONG, TypeKind.LONGLONG,
            TypeKind.ULONGLONG, TypeKind.SHORT, TypeKind.USHORT, TypeKind.UCHAR, TypeKind.CHAR_S,
            TypeKind.ENUM}
NUMBER = (r'((0x[0-9a-fA-F]+|\d+)u?|UINT\d+_MAX'
          r'|NBDI?_[A-Z_]*(MAX|MOST|MIN|LARGEST|STAGE|IOVECS|RANGES|BYTES))$')
SUPPORT = r'''
#include <stdio.h>
#include <stdlib.h>

static int nbdi_mutant = -1;
static unsigned char nbdi_hit[%d];

static inline int nbdi_mutated(int number)
{
    nbdi_hit[number] = 1;
    return nbdi_mutant == number;
}

static void nbdi_tell(void)
{
    FILE *out = fopen(getenv("NBDI_REACHED"), "a");
    int i;
    for (i = 0; out && i < (int)sizeof nbdi_hit; i++)
        if (nbdi_hit[i]) fprintf(out, "%%d\n", i);
    if (out) fclose(out);
}

__attribute__((constructor)) static void nbdi_choose(void)
{
    if (getenv("NBDI_MUTANT")) nbdi_mutant = atoi(getenv("NBDI_MUTANT"));
    if (getenv("NBDI_REACHED")) atexit(nbdi_tell);
}
'''

# kind: operator; start, end: bytes of nbd.h; form: how the range is written with a mutant
# in it, from its number, its text as it was and its text with inner mutants.
Place = collections.namedtuple('Place', 'kind function start end form before after nth')


class Finder:
    """Finds every place of the implementation where an operator applies."""

    def __init__(self, path):
        with open(path, 'rb') as source:
            self.bytes = source.read()
        self.path = path
        self.places = []
        self.unit = self.parse()
        self.macros = self.function_macros()
        self.function = None
        for cursor in self.unit.cursor.get_children():
            if cursor.kind == Kind.FUNCTION_DECL and cursor.is_definition() and self.is_ours(cursor):
                self.function = cursor
                self.visit(cursor, None, None)

    def parse(self):
        text = ('#define _POSIX_C_SOURCE 200112L\n#define NBD_IMPLEMENTATION\n#include "%s"\n'
                % self.path)
        options = cindex.TranslationUnit.PARSE_DETAILED_PROCESSING_RECORD
        unit = cindex.Index.create().parse(
            'main.c', args=['-std=c99', builtin_headers()],
            unsaved_files=[('main.c', text)], options=options)
        errors = [one for one in unit.diagnostics if one.severity >= cindex.Diagnostic.Error]
        if errors:
            sys.exit('mutate: %s' % errors[0])
        return unit

    def is_ours(self, cursor):
        where = cursor.location.file
        return where and os.path.realpath(where.name) == os.path.realpath(self.path)

    def function_macros(self):
        """Ranges where a macro with arguments is expanded, sorted."""
        ranges = []
        for cursor in self.unit.cursor.get_children():
            if cursor.kind == Kind.MACRO_INSTANTIATION and self.is_ours(cursor):
                start, end = cursor.extent.start.offset, cursor.extent.end.offset
                if self.bytes[start:end].endswith(b')'):
                    ranges.append((start, end))
        return sorted(ranges)

    def in_macro(self, start, end):
        at = bisect.bisect_right(self.macros, (start, len(self.bytes)))
        return any(a <= start and end <= b for a, b in self.macros[max(0, at - 3):at])

    def text(self, start, end):
        return self.bytes[start:end].decode()

    def extent(self, cursor):
        return cursor.extent.start.offset, cursor.extent.end.offset

    def add(self, kind, cursor, form, after):
        start, end = self.extent(cursor)
        if start >= end or self.in_macro(start, end) or not self.is_ours(cursor):
            return
        if any((one.kind, one.start, one.end, one.after) == (kind, start, end, after)
               for one in self.places[-8:]):
            return  # a macro of several tokens
        before = ' '.join(self.text(start, end).split())
        name = self.function.spelling
        same = sum(1 for one in self.places if (one.kind, one.function, one.before, one.after)
                   == (kind, name, before, after))
        self.places.append(Place(kind, name, start, end, form, before, after, same + 1))

    def visit(self, cursor, parent, context):
        """`context`: the nearest parent that is neither a cast nor parentheses."""
        children = list(cursor.get_children())
        if not self.is_choice(parent, cursor):
            self.consider(cursor, parent, context)
        if cursor.kind == Kind.CASE_STMT:
            children = children[1:]
        if cursor.kind == Kind.VAR_DECL and cursor.storage_class == cindex.StorageClass.STATIC:
            return
        if cursor.kind == Kind.CXX_UNARY_EXPR or self.is_array_bound(cursor):
            return
        seen_through = cursor.kind in (Kind.UNEXPOSED_EXPR, Kind.PAREN_EXPR)
        for child in children:
            self.visit(child, cursor, context if seen_through else cursor)

    def is_choice(self, parent, cursor):
        """Whether it is the condition of a minimum: both choices are right at equality."""
        if parent is None or parent.kind != Kind.CONDITIONAL_OPERATOR:
            return False
        condition, first, second = parent.get_children()
        if cursor != condition or cursor.kind != Kind.BINARY_OPERATOR:
            return False
        parts = [self.text(*self.extent(one)) for one in list(cursor.get_children())]
        return sorted(parts) == sorted(self.text(*self.extent(one)) for one in (first, second))

    @staticmethod
    def is_array_bound(cursor):
        return cursor.kind == Kind.VAR_DECL and cursor.type.kind == TypeKind.CONSTANTARRAY

    def consider(self, cursor, parent, context):
        if cursor.kind == Kind.BINARY_OPERATOR:
            self.consider_binary(cursor)
        if cursor.kind in (Kind.IF_STMT, Kind.WHILE_STMT, Kind.CONDITIONAL_OPERATOR):
            self.consider_condition(next(cursor.get_children()))
        if cursor.kind == Kind.INTEGER_LITERAL:
            self.consider_constant(cursor, context)
        if cursor.kind == Kind.RETURN_STMT:
            self.consider_return(cursor)
        if parent is not None and self.is_statement(cursor, parent):
            self.consider_statement(cursor)

    def operator(self, cursor):
        """(operator, left, right) of a binary one that is spelled in one place."""
        left, right = cursor.get_children()
        between = self.text(left.extent.end.offset, right.extent.start.offset)
        return re.sub(r'//.*|/\*.*?\*/', '', between).strip(), left, right

    def consider_binary(self, cursor):
        sign, left, right = self.operator(cursor)
        a, b = self.text(*self.extent(left)), self.text(*self.extent(right))
        other = COMPARE.get(sign) or LOGIC.get(sign)
        if sign in SIGN and right.type.get_canonical().kind in INTEGERS:
            pointer = left.type.get_canonical().kind not in INTEGERS
            other = None if pointer and sign == '-' else SIGN[sign]
        if not other:
            return
        kind = 'compare' if sign in COMPARE else 'logic' if sign in LOGIC else 'sign'
        broken = '(%s) %s (%s)' % (a, other, b)
        self.add(kind, cursor, '(nbdi_mutated({0}) ? %s : ({1}))' % escape(broken),
                 ' '.join(('%s %s %s' % (a, other, b)).split()))

    def consider_condition(self, cursor):
        if cursor.kind == Kind.BINARY_OPERATOR and self.operator(cursor)[0] in ('==', '!='):
            return  # the same as "compare"
        self.add('negate', cursor, '(nbdi_mutated({0}) ^ !!({1}))',
                 '!(%s)' % ' '.join(self.text(*self.extent(cursor)).split()))

    def consider_constant(self, cursor, context):
        """A number that counts: a truth that is stored is turned over, flags and signs are not."""
        text = self.text(*self.extent(cursor))
        kind, sign = context.kind, ''
        if kind in (Kind.RETURN_STMT, Kind.INIT_LIST_EXPR, Kind.UNARY_OPERATOR):
            return
        if kind == Kind.BINARY_OPERATOR:
            sign = self.operator(context)[0]
        if sign in ('&', '|') or text == 'NULL' or not re.match(NUMBER, text):
            return
        if (kind == Kind.VAR_DECL or sign == '=') and text in ('0', '1'):
            changes = [str(1 - int(text))]
        else:
            changes = [text + ' + 1'] + ([text + ' - 1'] if text not in ('0', '0u') else [])
        if context.kind == Kind.BINARY_OPERATOR and sign in SAME:
            changes = [one for one in changes if SAME[sign] not in one]
        for broken in changes:
            self.add('constant', cursor, '(nbdi_mutated({0}) ? (%s) : ({1}))' % broken, broken)

    def consider_return(self, cursor):
        values = list(cursor.get_children())
        kind = self.function.result_type.get_canonical().kind
        if not values or kind not in INTEGERS | {TypeKind.POINTER}:
            return
        text = self.text(*self.extent(values[0]))
        other = '1' if text == '0' or self.is_zero(values[0]) else '0'
        if kind != TypeKind.POINTER or text != 'NULL':
            self.add('return', values[0], '(nbdi_mutated({0}) ? %s : ({1}))' % other, 'return ' + other)

    def is_zero(self, cursor):
        """Whether it names an enumerator of value 0."""
        children = list(cursor.get_children())
        if cursor.kind == Kind.UNEXPOSED_EXPR and len(children) == 1:
            return self.is_zero(children[0])
        meant = cursor.referenced if cursor.kind == Kind.DECL_REF_EXPR else None
        return bool(meant) and meant.kind == Kind.ENUM_CONSTANT_DECL and meant.enum_value == 0

    @staticmethod
    def is_statement(cursor, parent):
        if parent.kind == Kind.COMPOUND_STMT or parent.kind in (Kind.CASE_STMT, Kind.DEFAULT_STMT):
            return cursor.kind.is_expression()
        if parent.kind in (Kind.IF_STMT, Kind.WHILE_STMT):
            first = next(parent.get_children())
            return cursor.kind.is_expression() and cursor != first
        return False

    def consider_statement(self, cursor):
        start, end = self.extent(cursor)
        text = self.text(start, end)
        kind = 'call' if cursor.kind == Kind.CALL_EXPR or text.startswith('(void)') else 'delete'
        if not re.match(r'\(void\)(\(|\w+$)', text):
            self.add(kind, cursor, '(nbdi_mutated({0}) ? (void)0 : (void)({1}))', ';')


def escape(text):
    return text.replace('{', '{{').replace('}', '}}')


def builtin_headers():
    return '-I' + sorted(glob.glob('/usr/lib/llvm-14/lib/clang/*/include'))[0]


def key_of(place):
    nth = ' (%d)' % place.nth if place.nth > 1 else ''
    return '%s `%s` -> `%s`%s' % (place.kind, place.before, place.after, nth)


def rank(seed, place):
    text = '%s %s %s' % (seed, place.function, key_of(place))
    return hashlib.sha256(text.encode()).hexdigest()


def turns(groups):
    """One of each group in turn, until all are used up."""
    groups = [list(group) for group in groups]
    while groups:
        for group in groups:
            yield group.pop(0)
        groups = [group for group in groups if group]


def grouped(places, field):
    groups = collections.OrderedDict()
    for place in places:
        groups.setdefault(getattr(place, field), []).append(place)
    return groups.values()


def choose(places, count, seed):
    """Evenly over operators, and of each operator evenly over functions."""
    ranked = sorted(places, key=lambda place: rank(seed, place))
    by_kind = [turns(grouped(group, 'function')) for group in grouped(ranked, 'kind')]
    chosen = list(turns(by_kind))
    return chosen[:count] if count else chosen


def write_mutants(source, chosen):
    """The text of nbd.h with all mutants in it."""
    numbered = sorted(enumerate(chosen), key=lambda one: (one[1].start, -one[1].end, one[0]))

    def render(start, end, inside):
        out, at, i = [], start, 0
        while i < len(inside):
            number, place = inside[i]
            j = i + 1
            while j < len(inside) and inside[j][1].start < place.end:
                j += 1
            out.append(source[at:place.start].decode())
            inner = render(place.start, place.end, inside[i + 1:j])
            out.append(place.form.format(number, inner))
            at, i = place.end, j
        out.append(source[at:end].decode())
        return ''.join(out)

    text = render(0, len(source), numbered)
    mark = '#define NBD_IMPLEMENTATION_DONE\n'
    return text.replace(mark, mark + SUPPORT % len(chosen), 1)


def run(command, **options):
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
                          **options)


class Program:
    """A test program with all mutants in it."""

    def __init__(self, source, tree):
        self.name = os.path.splitext(os.path.basename(source))[0]
        self.path = os.path.join(tree, self.name)
        compiler = os.environ.get('CC', 'gcc')
        done = run([compiler, '-std=c99', '-O1', '-w', '-I' + tree, '-I' + tree + '/tests',
                    '-o', self.path, source])
        if done.returncode:
            sys.exit('mutate: %s does not compile\n%s' % (source, done.stdout.decode()[:2000]))
        began = time.monotonic()
        self.reached = self.first_run()
        self.seconds = time.monotonic() - began

    def first_run(self):
        """The mutants that it reaches; None if it fails as it is, and so tells nothing."""
        told = self.path + '.reached'
        done = run([self.path], env=dict(os.environ, NBDI_REACHED=told))
        if done.returncode:
            print('FAILS without a mutant, left out: %s' % self.name, flush=True)
            return None
        if not os.path.exists(told):
            return set()
        with open(told, encoding='ascii') as lines:
            return {int(line) for line in lines}

    def kills(self, number):
        """Why the mutant is dead, or None.  Stops at the first failure."""
        child = subprocess.Popen([self.path], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                 env=dict(os.environ, NBDI_MUTANT=str(number)),
                                 stdin=subprocess.DEVNULL)
        late = threading.Event()
        timer = threading.Timer(5 + 8 * self.seconds, lambda: (late.set(), child.kill()))
        timer.start()
        try:
            failed = next((line for line in child.stdout if line.startswith(b'FAIL')), None)
        finally:
            if failed:
                child.kill()
            child.stdout.close()
            child.wait()
            timer.cancel()
        if late.is_set():
            return 'hangs in %s' % self.name
        if failed:
            return '%s %s' % (self.name, failed[5:60].decode(errors='replace').split(':')[0])
        return None if child.returncode == 0 else '%s exits %d' % (self.name, child.returncode)


def copy_tree(tree, header):
    run(['cp', '-r', 'tests', tree])
    with open(os.path.join(tree, 'nbd.h'), 'w', encoding='utf-8') as out:
        out.write(header)


def build_programs(tree, jobs):
    wanted, sources = os.environ.get('TESTS', '').split(), []
    for source in glob.glob(tree + '/tests/test_*.c') + glob.glob(tree + '/tests/hostile/*.c'):
        with open(source, encoding='utf-8') as text:
            if wanted and os.path.splitext(os.path.basename(source))[0] not in wanted:
                continue
            if re.search(r'^int main\(', text.read(), re.M):
                sources.append(source)
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        built = list(pool.map(lambda source: Program(source, tree), sorted(sources)))
    return [program for program in built if program.reached is not None], len(sources)


def judge(number, place, programs):
    """Why the mutant is dead, or None.  Runs the cheap programs first."""
    for program in sorted(programs, key=lambda one: one.seconds):
        if number in program.reached:
            why = program.kills(number)
            if why:
                return why
    print('# alive: %s: %s' % (place.function, key_of(place)), file=sys.stderr, flush=True)
    return None


def read_survivors():
    known, function = set(), ''
    with open(SURVIVORS, encoding='utf-8') as source:
        for line in source:
            heading = re.match(r'### `(.+)`$', line.rstrip())
            item = re.match(r'- (\w+ `.*` -> `.*?`(?: \(\d+\))?): \S', line)
            if heading:
                function = heading.group(1)
            elif item:
                known.add((function, item.group(1)))
    return known


def print_table(places, chosen, results):
    """What hung is part of what was killed."""
    print('%-10s %7s %7s %7s %7s %9s'
          % ('operator', 'places', 'chosen', 'killed', 'hung', 'survived'))
    for kind in sorted({place.kind for place in places}):
        numbers = [n for n, place in enumerate(chosen) if place.kind == kind]
        killed = [results[n] for n in numbers if results[n]]
        print('%-10s %7d %7d %7d %7d %9d'
              % (kind, sum(1 for place in places if place.kind == kind), len(numbers), len(killed),
                 sum(1 for why in killed if why.startswith('hangs')), len(numbers) - len(killed)))


def print_survivors(chosen, results, programs, known):
    unexplained = 0
    for number, place in enumerate(chosen):
        if results[number]:
            continue
        explained = (place.function, key_of(place)) in known
        unexplained += not explained
        reached = any(number in program.reached for program in programs)
        print('%s %s: %s%s' % ('survived' if explained else 'UNEXPLAINED', place.function,
                               key_of(place), '' if reached else ' (not reached)'))
    stale = [place for number, place in enumerate(chosen)
             if results[number] and (place.function, key_of(place)) in known]
    for place in stale:
        print('STALE %s: %s is killed now' % (place.function, key_of(place)))
    return unexplained + len(stale)


def write_list(chosen, results):
    os.makedirs('build', exist_ok=True)
    with open('build/mutation.txt', 'w', encoding='utf-8') as out:
        for place, why in zip(chosen, results):
            out.write('%s: %s: %s\n' % (place.function, key_of(place), why or 'survived'))


def main():
    began = time.monotonic()
    count, seed = int(os.environ.get('MUTANTS', '400')), os.environ.get('SEED', '1')
    jobs = int(os.environ.get('JOBS', '2'))
    only = os.environ.get('ONLY', '*').split()
    with tempfile.TemporaryDirectory(prefix='nbd-mutate.') as tree:
        run(['cp', 'nbd.h', tree])
        finder = Finder(os.path.join(tree, 'nbd.h'))
        places = [place for place in finder.places
                  if any(fnmatch.fnmatchcase(place.function, one) for one in only)]
        chosen = choose(places, count, seed)
        copy_tree(tree, write_mutants(finder.bytes, chosen))
        programs, sources = build_programs(tree, jobs)
        print('seed %s: %d of %d places in %d functions; %d programs, %.1f s' %
              (seed, len(chosen), len(places), len({place.function for place in chosen}),
               len(programs), sum(program.seconds for program in programs)), flush=True)
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            results = list(pool.map(lambda n: judge(n, chosen[n], programs), range(len(chosen))))
    write_list(chosen, results)
    print_table(places, chosen, results)
    known = read_survivors()
    wrong = print_survivors(chosen, results, programs, known)
    killed = sum(1 for one in results if one)
    alike = sum(1 for place, why in zip(chosen, results)
                if not why and (place.function, key_of(place)) in known)
    share = 100.0 * killed / max(1, len(chosen) - alike)
    print('killed %d of %d, %.1f %%; %.1f %% without the %d that are explained (the bar is %.0f %%)'
          '; %.0f s' % (killed, len(chosen), 100.0 * killed / max(1, len(chosen)), share, alike, BAR,
                        time.monotonic() - began))
    return 1 if wrong or share < BAR or len(programs) < sources else 0


if __name__ == '__main__':
    sys.exit(main())
