// Draws tokens: the semantics of cotrt/kernels/reference/sample.py without torch, row by row.
#pragma once

#include <cstdint>
#include <vector>

#include "aligned_buffer.h"
#include "kernel_table.h"

namespace cotrt {

struct Draw {
  const float* logits;  // [vocab] to draw from
  const float* raw;     // [vocab] whose logprob is given; may be the same
  float temperature;    // 0: the likeliest token
  int32_t top_k;        // 0: off
  float top_p, min_p;
  DrawKey key;
};

struct Drawn {
  int32_t token;   // -1 where bad
  float logprob;   // of the token in raw, temperature 1; NaN where bad
  bool bad;        // NaN or +inf among the logits, or none that is finite
};

class Sampler {
 public:
  Drawn draw(const Draw& d, int vocab);

 private:
  struct Candidate {
    float logit;
    int32_t id;
  };
  int32_t draw_from_top_k(const Draw& d, int vocab, float top);
  int32_t draw_from_all(const Draw& d, int vocab, float top, double mass);

  AlignedBuffer maxima_, weights_;
  std::vector<float> order_;
  std::vector<Candidate> candidates_;
};

}  // namespace cotrt
