"""What we say: the bytes that two strangers must agree on.

`messages` is the vocabulary (dataclasses without protobuf), `wire` turns it into bytes and back, `signing` vouches for
bytes, `limits` bounds them. The generated `*_pb2` modules are imported in here and by the gRPC shells only.
`README.md` tells the protocol in prose.
"""
