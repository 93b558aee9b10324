// The entries of attention: a job by its type, and the merge of a row's partial results by
// log-sum-exp, from root to leaf.

// Chunks' results from root to leaf, exactly as a job adds up those of its own group.
template <class T>
static void merge_chunks(const AttentionArgs& a, const int32_t* slots, int n, int head, char* to) {
  const int d = a.head_dim;
  const auto at = [&](int i) { return int64_t(slots[i]) * a.num_q_heads + head; };
  alignas(64) float o[kMaxHeadDim];
  memcpy(o, a.partial_out + at(0) * d, size_t(d) * 4);
  float top = a.partial_lse[at(0)], sum = a.partial_sum[at(0)];
  for (int i = 1; i < n; ++i)
    add_chunk(o, &top, &sum, a.partial_out + at(i) * d, a.partial_lse[at(i)], a.partial_sum[at(i)],
              d);
  const F inverse = set1(sum == 0.f ? 0.f : 1.f / sum);
  for (int i = 0; i < d; i += kLanes)
    T::store_row(to + i * sizeof(typename T::Row), mul(load(o + i), inverse));
}

template <class T>
static void attention_merge_typed(const AttentionArgs& a, int row0, int row1) {
  using R = typename T::Row;
  const int d = a.head_dim, lanes = d / kLanes;
  for (int row = row0; row < row1; ++row) {
    const int32_t* slots = a.row_partials + a.row_partial_offsets[row];
    const int n = a.row_partial_offsets[row + 1] - a.row_partial_offsets[row];
    if (n == 0 || slots[0] < 0) continue;  // written directly by its lone group
    for (int head = 0; head < a.num_q_heads; ++head) {
      if (a.fixed_chunks) {
        merge_chunks<T>(a, slots, n, head,
                        a.out + row * a.out_stride + ptrdiff_t(head) * d * sizeof(R));
        continue;
      }
      float top = -INFINITY;
      for (int i = 0; i < n; ++i) {
        const float lse = a.partial_lse[int64_t(slots[i]) * a.num_q_heads + head];
        if (!(lse <= top)) top = lse;  // a NaN wins
      }
      F acc[kMaxHeadDim / kLanes];
      for (int j = 0; j < lanes; ++j) acc[j] = zero();
      float total = 0.f;
      for (int i = 0; i < n; ++i) {
        const int64_t slot = int64_t(slots[i]) * a.num_q_heads + head;
        const float lse = a.partial_lse[slot];
        if (lse == -INFINITY) continue;
        const float weight = ::exp2f(lse - top);
        total += weight;
        for (int j = 0; j < lanes; ++j)
          acc[j] = fma(load(a.partial_out + slot * d + j * kLanes), set1(weight), acc[j]);
      }
      const F inverse = set1(total == 0.f ? 0.f : 1.f / total);
      char* to = a.out + row * a.out_stride + ptrdiff_t(head) * d * sizeof(R);
      for (int j = 0; j < lanes; ++j)
        T::store_row(to + j * kLanes * sizeof(R), mul(acc[j], inverse));
    }
  }
}

static void attention(const AttentionArgs& a, const AttentionJob& job, const AttentionJob* next,
                      char* scratch) {
  if (a.type == DType::kFloat32)
    attention_job<F32Type, VectorTiles<F32Type>>(a, job, next, scratch);
  else
    attention_job<Bf16Type, VectorTiles<Bf16Type>>(a, job, next, scratch);
}

static void attention_merge(const AttentionArgs& a, int row0, int row1) {
  if (a.type == DType::kFloat32)
    attention_merge_typed<F32Type>(a, row0, row1);
  else
    attention_merge_typed<Bf16Type>(a, row0, row1);
}
