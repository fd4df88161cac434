"""A Milvus of its own process: `milvus_server.py FOLDER PORT [TOKEN]`, until its input ends; prints the port."""

import base64
import sys
from concurrent.futures import ThreadPoolExecutor

import grpc
from milvus_lite.adapter.grpc.servicer import MilvusServicer
from milvus_lite.db import MilvusLite
from pymilvus.grpc_gen import milvus_pb2_grpc


class Guard(grpc.ServerInterceptor):
    """Lets in who has the token, as Milvus does where authorization is on; the embedded one lets in everybody."""

    def __init__(self, token: str):
        self.wanted = base64.b64encode(token.encode()).decode()

    def intercept_service(self, continuation, details):
        if dict(details.invocation_metadata).get("authorization") == self.wanted:
            return continuation(details)
        return grpc.unary_unary_rpc_method_handler(
            lambda request, context: context.abort(grpc.StatusCode.UNAUTHENTICATED, "auth check failure")
        )


def main() -> None:
    folder, port, *token = sys.argv[1:]
    server = grpc.server(ThreadPoolExecutor(4), interceptors=[Guard(*token)] if token else [])
    milvus_pb2_grpc.add_MilvusServiceServicer_to_server(MilvusServicer(MilvusLite(folder)), server)
    print(server.add_insecure_port(f"127.0.0.1:{port}"), flush=True)
    server.start()
    sys.stdin.read()


if __name__ == "__main__":
    main()
