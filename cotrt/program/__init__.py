"""The program API: `LLM`, branches, handles, chats, and what they answer with."""
