// Memory for packed weights: matrices side by side in slabs of huge pages, zero at first.
//
// Reading all weights once a step misses the TLB on every small page; most matrices are smaller
// than what would be worth huge pages of its own. A slab lives until the last matrix in it goes.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>

#include "aligned_buffer.h"

namespace cotrt {

class WeightMemory {
 public:
  WeightMemory() = default;
  explicit WeightMemory(size_t bytes);
  char* data() const { return data_; }

 private:
  class Slab;
  std::shared_ptr<Slab> slab_;
  char* data_ = nullptr;
};

}  // namespace cotrt
