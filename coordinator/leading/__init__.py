"""A leader's shell over ports: the driver asks the deciding code and carries out, the service speaks gRPC.

For the coordinator and for a stand-in alike, so nothing in here knows of databases, web pages or folders.
"""
