// Passes over a row of logits for the sampler (sampler.cpp decides, these only sweep).

// Sixteen logits from i; -inf past the end.
static inline F logits_at(const float* logits, int n, int i) {
  if (i + kLanes <= n) return load(logits + i);
  alignas(64) float tail[kLanes];
  for (int j = 0; j < kLanes; ++j) tail[j] = i + j < n ? logits[i + j] : -INFINITY;
  return load(tail);
}

static float block_maxima(const float* logits, int n, float* maxima) {
  F top = set1(-INFINITY);
  for (int b = 0; b * kSampleBlock < n; ++b) {
    const int i = b * kSampleBlock;
    const F most = max(max(logits_at(logits, n, i), logits_at(logits, n, i + kLanes)),
                       max(logits_at(logits, n, i + 2 * kLanes), logits_at(logits, n, i + 3 * kLanes)));
    maxima[b] = reduce_max(most);
    top = max(top, set1(maxima[b]));
  }
  return reduce_max(top);
}

static double exp_sum(const float* logits, int n, float top, float inverse_temperature,
                      float* weights) {
  const F scale = set1(inverse_temperature * kLog2E), shift = set1(top);
  double total = 0;
  for (int i = 0; i < n;) {
    // Sums of at most 64 terms a lane keep float32's rounding small.
    const int end = min_int(n, i + 64 * kLanes);
    F sum = zero();
    for (; i < end; i += kLanes) {
      const F w = exp2(mul(sub(logits_at(logits, n, i), shift), scale));
      if (weights) store(weights + i, w);
      sum = add(sum, w);
    }
    total += double(reduce_add(sum));
  }
  if (weights)
    for (int i = ceil_div(n, kLanes) * kLanes; i % kSampleBlock; ++i) weights[i] = 0.f;
  return total;
}

static double sum_at_least(const float* weights, int n, float t) {
  const F least = set1(t);
  double total = 0;
  for (int i = 0; i < n;) {
    const int end = min_int(n, i + 64 * kLanes);
    F s0 = zero(), s1 = zero(), s2 = zero(), s3 = zero();
    for (; i < end; i += kSampleBlock) {
      s0 = add(s0, keep_at_least(load(weights + i), least));
      s1 = add(s1, keep_at_least(load(weights + i + kLanes), least));
      s2 = add(s2, keep_at_least(load(weights + i + 2 * kLanes), least));
      s3 = add(s3, keep_at_least(load(weights + i + 3 * kLanes), least));
    }
    total += double(reduce_add(add(add(s0, s1), add(s2, s3))));
  }
  return total;
}

// Token i beats the score s when -log(u) < weight * exp(-s), and 1 - u <= -log(u): the noise's 23
// bits flipped, an integer, are compared with weight * factor, factor = exp(-s) * 2^23 and a bit.
static uint64_t race(const float* weights, uint32_t first_id, DrawKey key, float at_least,
                     float factor) {
  int32_t may[kSampleBlock];
  int32_t any = 0;
  for (int i = 0; i < kSampleBlock; ++i) {
    const int32_t complement = int32_t(~noise_bits(key, first_id + uint32_t(i)) >> 9);
    const float w = weights[i];
    may[i] = int32_t(float(complement) <= w * factor) & int32_t(w >= at_least);
    any |= may[i];
  }
  if (!any) return 0;
  uint64_t bits = 0;
  for (int i = 0; i < kSampleBlock; ++i) bits |= uint64_t(may[i] != 0) << i;
  return bits;
}
