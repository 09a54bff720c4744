#!/usr/bin/python3
"""early.py PORT FILE: a server of 8 MiB on 127.0.0.1 that answers each write as soon as it has
its header, before the data has come.  It serves one client, and then writes the disk to FILE."""

import socket
import struct
import sys

WRITE, DISCONNECT = 1, 2
GO, ACK, INFO, UNSUPPORTED = 7, 1, 3, 0x80000001

disk = bytearray(8 << 20)
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
client = server.accept()[0]
client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
stream = client.makefile("rb")


def take(layout):
    return struct.unpack(layout, stream.read(struct.calcsize(layout)))


def reply_option(option, kind, data=b""):
    client.sendall(struct.pack(">QIII", 0x3E889045565A9, option, kind, len(data)) + data)


def negotiate():
    client.sendall(b"NBDMAGICIHAVEOPT" + struct.pack(">H", 3))
    take(">I")
    option = 0
    while option != GO:
        _, option, size = take(">QII")
        stream.read(size)
        if option == GO:
            reply_option(option, INFO, struct.pack(">HQH", 0, len(disk), 1))
        reply_option(option, ACK if option == GO else UNSUPPORTED)


def transmit():
    while True:
        _, _, command, cookie, offset, size = take(">IHHQQI")
        if command == DISCONNECT:
            return
        reply = struct.pack(">IIQ", 0x67446698, 0, cookie)
        if command == WRITE:
            client.sendall(reply)
            disk[offset:offset + size] = stream.read(size)
        else:
            client.sendall(reply + disk[offset:offset + size])


negotiate()
transmit()
client.close()
with open(sys.argv[2], "wb") as out:
    out.write(disk)
