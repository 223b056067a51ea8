"""The control plane: TLS 1.3 connections between ranks of D and P."""
