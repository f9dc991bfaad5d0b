"""The gateway: an OpenAI URL for each session, behind which an agent's calls become the episodes of one rollout of a claimed task."""
