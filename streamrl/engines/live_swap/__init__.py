"""New weights under a server that decodes: a second buffer staged beside the forward passes, and a commit between two of them."""
