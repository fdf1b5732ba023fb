#!/usr/bin/env python3
"""answers.py OUT PROGRAM: writes OUT/PROGRAM.cu, and the headers that it changes, with all answers
to all puzzles of that program. Each function or table that an answer changes is there once for each
answer, and PUZZLE_ANSWER=N chooses. So one build serves the tests of some forty answers. N counts
all answers of all puzzles. Prints lines `N PUZZLE ANSWER`, or `apart PUZZLE ANSWER` for an answer
that changes more than bodies."""
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile

HELPER = 'puzzle_answer.h'
HELPER_TEXT = '''// Returns the number of the answer that is to be played; 0: the real lines.
#pragma once
#include <stdlib.h>
static inline int puzzle_answer(void) {
    const char *number = getenv("PUZZLE_ANSWER");
    return number ? atoi(number) : 0;
}
'''


def units(text):
    """Cuts a source into (name, text): definitions by their names, and what is between them."""
    parts, between, lines = [], [], text.splitlines(keepends=True)
    i = 0
    while i < len(lines):
        line = lines[i]
        if not re.match(r'[A-Za-z_]', line):
            between.append(line)
            i += 1
            continue
        end = i
        if not re.search(r'[;}]\s*(//.*)?$', line):
            end += 1
            while end < len(lines) and not re.match(r'}', lines[end]) and \
                    not (lines[end - 1].rstrip().endswith(';') and
                         '{' not in ''.join(lines[i:end])):
                end += 1
        head = ''.join(lines[i:end + 1]).split('{')[0]
        # Not of __launch_bounds__(...), which stands before a kernel's name.
        match = re.search(r'\b(?!__)(\w+)\(', head) if '(' in head else re.search(r'(\w+)\[', head)
        body = ''.join(lines[i:end + 1])
        parts.append((None, ''.join(between)))
        between = []
        parts.append((match.group(1) if match and '{' in body else None, body))
        i = end + 1
    parts.append((None, ''.join(between)))
    return parts


def definitions(text):
    found = {}
    for name, body in units(text):
        if name:
            found.setdefault(name, []).append(body)
    return found


def code(body):
    return re.sub(r'\s+', ' ', re.sub(r'//.*', '', body))


def changed(real, other):
    """Returns {name: new body} of the definitions that differ, or None if that is not all."""
    before, after = definitions(real), definitions(other)
    if set(before) != set(after):
        return None
    rest = [''.join(code(b) for n, b in units(t) if not n) for t in (real, other)]
    if rest[0] != rest[1]:
        return None
    bodies = {}
    for name, old in before.items():
        new = after[name]
        if [code(x) for x in old] == [code(x) for x in new]:
            continue
        head = new[0].split('{')[0]
        defaults = '(' in head and '= ' in head.split('(', 1)[-1]
        if len(old) > 1 or head != old[0].split('{')[0] or defaults \
                or len(re.findall(r'\b%s\b' % name, re.sub(r'"[^"]*"', '', code(new[0])))) > 1:
            return None
        bodies[name] = new[0]
    return bodies


def apply(patch, folder):
    """Applies a patch to copies of the real files; returns {file: text}."""
    files = re.findall(r'^\+\+\+ b/(.*)', open(patch).read(), re.M)
    start = os.path.join(os.path.dirname(patch), 'start')
    for file in files:
        os.makedirs(os.path.join(folder, os.path.dirname(file)), exist_ok=True)
        real = file if os.path.exists(file) else os.path.join(start, file)
        shutil.copy(real, os.path.join(folder, file))
    done = subprocess.run(['patch', '-s', '-p1', '-F0', '--no-backup-if-mismatch', '-d', folder],
                          stdin=open(patch), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f'{patch}: {done.stdout.decode()}')
    return {file: open(os.path.join(folder, file)).read() for file in files}


def pick(name, versions):
    """The definition in all its versions, and a reference to the one that was asked for."""
    out, choice = [], f'{name}__0'
    for k, (body, numbers) in enumerate(versions):
        out.append(re.sub(r'\b%s\b' % name, f'{name}__{k}', body, count=1))
        asked = ' || '.join(f'puzzle_answer() == {n}' for n in numbers)
        if k:
            choice = f'{asked} ? {name}__{k} : {choice}'
    out.append(f'static decltype({name}__0) &{name} = {choice};\n')
    return '\n'.join(out)


def main():
    out, program = sys.argv[1:]
    number, answers = 0, {}  # answers: file -> name -> [(number, body)]
    for puzzle in sorted(glob.glob('dev/puzzles/[0-9]*/')):
        named = re.search(r'^program (.*)', open(puzzle + 'check.txt').read(), re.M)
        for patch in sorted(glob.glob(puzzle + '*.patch')):
            number += 1
            if not named or program not in named.group(1).split():
                continue
            answer = os.path.basename(patch)[:-6]
            with tempfile.TemporaryDirectory() as folder:
                files = apply(patch, folder)
            # A file of `start` is no part of the program.
            bodies = {file: changed(open(file).read(), text)
                      for file, text in files.items() if os.path.exists(file)}
            if None in bodies.values():
                print('apart', os.path.basename(puzzle[:-1]), answer)
                continue
            print(number, os.path.basename(puzzle[:-1]), answer)
            for file, found in bodies.items():
                for name, body in found.items():
                    answers.setdefault(file, {}).setdefault(name, []).append((number, body))
    own = next(f for f in (f'{program}.cu', f'dev/lessons/{program}.cu') if os.path.exists(f))
    answers.setdefault(own, {})
    os.makedirs(out, exist_ok=True)
    with open(os.path.join(out, HELPER), 'w') as file:
        file.write(HELPER_TEXT)
    for file, names in answers.items():
        if file.endswith('.cu') and file != own:
            continue
        text = f'#include "{HELPER}"\n'
        for name, body in units(open(file).read()):
            if name not in names:
                text += body
                continue
            versions = [[body, []]]
            for n, new in names[name]:
                same = [v for v in versions[1:] if v[0] == new]
                if same:
                    same[0][1].append(n)
                else:
                    versions.append([new, [n]])
            text += pick(name, versions)
        path = os.path.join(out, f'{program}.cu' if file == own else file)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, 'w') as target:
            target.write(text)


main()
