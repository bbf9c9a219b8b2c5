"""Replies that are known beforehand, to measure drafts from a conversation's history."""
