"""Parts of the client: addresses, HTTP and gRPC connections, and texts to tensors and back."""
