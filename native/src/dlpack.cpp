#include "dlpack.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "arena.h"

namespace kvquota {
namespace {

struct Context {
  std::shared_ptr<Arena> arena;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
  DLManagedTensor tensor;
};

void destroy(DLManagedTensor* tensor) {
  const std::unique_ptr<Context> context(static_cast<Context*>(tensor->manager_ctx));
  context->arena->release();
}

std::vector<int64_t> row_major(const std::vector<int64_t>& shape, uint64_t most) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t axis = shape.size(); axis-- > 1;) {
    const auto extent = static_cast<uint64_t>(std::max<int64_t>(shape[axis], 1));
    if (extent > most / static_cast<uint64_t>(strides[axis])) {
      throw std::invalid_argument("the shape has more elements than the arena, which has room for " +
                                  std::to_string(most));
    }
    strides[axis - 1] = strides[axis] * static_cast<int64_t>(extent);
  }
  return strides;
}

// Elements from the first to the last one, both included; 0 for an empty tensor.
uint64_t span(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides, uint64_t most) {
  uint64_t last = 0;
  for (const int64_t extent : shape) {
    if (extent == 0) return 0;
  }
  for (size_t axis = 0; axis < shape.size(); ++axis) {
    const auto steps = static_cast<uint64_t>(shape[axis] - 1);
    const auto stride = static_cast<uint64_t>(strides[axis]);
    if (stride != 0 && steps > (most - last) / stride) return most + 1;
    last += steps * stride;
  }
  return last + 1;
}

}  // namespace

DLManagedTensor* make_tensor(std::shared_ptr<Arena> arena, uint64_t offset, std::vector<int64_t> shape,
                             DLDataType dtype, std::optional<std::vector<int64_t>> strides) {
  const PageMapper& layout = arena->layout();
  if (dtype.bits == 0 || dtype.bits % 8 != 0) {
    throw std::invalid_argument("type_bits is " + std::to_string(dtype.bits) +
                                ", not a positive multiple of 8");
  }
  const uint64_t item = dtype.bits / 8;
  const uint64_t most = layout.size() / item;
  for (const int64_t extent : shape) {
    if (extent < 0 || static_cast<uint64_t>(extent) > most) {
      throw std::invalid_argument("shape has " + std::to_string(extent) + ", the arena room for " +
                                  std::to_string(most) + " elements");
    }
  }
  if (!strides) strides = row_major(shape, most);
  if (strides->size() != shape.size()) {
    throw std::invalid_argument(std::to_string(strides->size()) + " strides for a shape of " +
                                std::to_string(shape.size()) + " axes");
  }
  for (const int64_t stride : *strides) {
    if (stride < 0) throw std::invalid_argument("stride " + std::to_string(stride) + " is negative");
  }
  const uint64_t room = offset > layout.size() ? 0 : (layout.size() - offset) / item;
  if (offset > layout.size() || span(shape, *strides, most) > room) {
    throw std::invalid_argument("a tensor at offset " + std::to_string(offset) +
                                " does not end within the arena's " + std::to_string(layout.size()) +
                                " bytes");
  }
  if (offset % item != 0) {
    throw std::invalid_argument("offset " + std::to_string(offset) + " is not a multiple of the element's " +
                                std::to_string(item) + " bytes");
  }

  arena->retain();
  const DeviceId device = layout.driver().device();
  auto context =
      std::make_unique<Context>(Context{std::move(arena), std::move(shape), std::move(*strides), {}});
  DLTensor& tensor = context->tensor.dl_tensor;
  tensor.data = reinterpret_cast<void*>(layout.base() + offset);
  tensor.device = {device.type, device.index};
  tensor.ndim = static_cast<int32_t>(context->shape.size());
  tensor.dtype = dtype;
  tensor.shape = context->shape.data();
  tensor.strides = context->strides.data();
  tensor.byte_offset = 0;
  context->tensor.manager_ctx = context.get();
  context->tensor.deleter = destroy;
  return &context.release()->tensor;
}

}  // namespace kvquota
