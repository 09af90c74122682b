"""What our gateway adds to the OpenAI chat-completions wire: exact token ids and their log-probs.

Request header ROLLOUT_HEADER names the conversation; the reply then carries the fields of
`shared_schemas.trajectory.PolicyLogprobs` so that what was sampled is what is trained:

    prompt_token_ids, prompt_ids_reused      at the top of the reply
    token_ids, token_logprobs, versions      in choices[0]
    raw_text                                 in choices[0]: all that was sampled, but the stop token, as text;
                                             what was parsed as a call has left the message's content

`return_token_ids: true` in the request asks for the full prompt ids (prompt_ids_reused = 0).

`processed_logprobs: true` in the request: every log-prob is that of the distribution that the token was drawn
from, after temperature, top_p and top_k, renormalised; otherwise that of softmax(logits / temperature),
before any truncation. Where samples are weighted by what sampled them, only the former is right.

`max_model_length` in the request, with or without the header: a job's own limit, below the model's. Where the
prompt and max_tokens together exceed the lower of the two, the reply is a 400 with CONTEXT_LENGTH_EXCEEDED,
the counts `prompt_tokens` and `max_tokens`, and the limit as `max_model_len`.

With or without the header: `sampling_finish_reason` in choices[0], how sampling itself ended ("stop",
"length" or "abort"), since OpenAI's `finish_reason` reads "tool_calls" wherever a call was parsed; and, where
a tool call in the text could not be read, the reason as `tool_call_error` in the message, whose content is
the raw text.
"""

ROLLOUT_HEADER = "X-Turnwise-Rollout"
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
