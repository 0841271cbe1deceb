"""The page authority of a paged KV cache: allocation, sharing, step transactions and int32 index plans."""
