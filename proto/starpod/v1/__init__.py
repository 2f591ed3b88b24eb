"""The contract: generated messages (`environment_pb2`) and service stubs (`environment_pb2_grpc`), and how both sides
read values and errors."""
