"""The CPU benchmark: real masks, the codec beside memcpy and Zstd, a trainer that publishes."""
