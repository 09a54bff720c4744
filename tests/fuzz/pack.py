#!/usr/bin/env python3
"""Keeps the inputs of a fuzz target in one file: a line of base64 for each.

    pack.py pack DIRECTORY...  >FILE
    pack.py unpack FILE DIRECTORY
"""
import base64
import hashlib
import pathlib
import sys


def pack(directories):
    files = (path for name in directories for path in pathlib.Path(name).iterdir())
    inputs = {path.read_bytes() for path in files}
    for data in sorted(inputs, key=lambda data: (len(data), data)):
        if data:
            print(base64.b64encode(data).decode())


def unpack(file, directory):
    to = pathlib.Path(directory)
    to.mkdir(parents=True, exist_ok=True)
    for line in pathlib.Path(file).read_text().split():
        data = base64.b64decode(line, validate=True)
        (to / hashlib.sha1(data).hexdigest()).write_bytes(data)


def main(words):
    if len(words) >= 2 and words[0] == "pack":
        pack(words[1:])
    elif len(words) == 3 and words[0] == "unpack":
        unpack(*words[1:])
    else:
        sys.exit(__doc__)


main(sys.argv[1:])
