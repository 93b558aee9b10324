"""The program API: `LLM`, branches, handles, chats, saved branches."""
