"""The bus on NATS JetStream. No other package imports nats."""
