#include <cstdio>
#include <onnxruntime_cxx_api.h>
#include <opencv2/imgcodecs.hpp>
#include <opencv2/imgproc.hpp>

int main() {
  Ort::Env env(ORT_LOGGING_LEVEL_WARNING, "detect");
  Ort::Session session(env, ORT_TSTR("best.onnx"), Ort::SessionOptions());
  cv::Mat photo;
  cv::cvtColor(cv::imread("photo.jpg", cv::IMREAD_COLOR), photo, cv::COLOR_BGR2RGB);
  float conf = 0.4f, iou = 0.45f;
  int64_t max_det = 300;
  const int64_t shape[] = {photo.rows, photo.cols, 3}, one[] = {1};
  auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  Ort::Value input_values[] = {Ort::Value::CreateTensor<uint8_t>(memory, photo.data, photo.total() * 3, shape, 3),
                               Ort::Value::CreateTensor<float>(memory, &conf, 1, one, 1),
                               Ort::Value::CreateTensor<float>(memory, &iou, 1, one, 1),
                               Ort::Value::CreateTensor<int64_t>(memory, &max_det, 1, one, 1)};
  const char *inputs[] = {"image", "conf", "iou", "max_det"}, *outputs[] = {"boxes", "scores", "classes"};
  auto output = session.Run(Ort::RunOptions(), inputs, input_values, 4, outputs, 3);
  const float *box = output[0].GetTensorData<float>(), *scores = output[1].GetTensorData<float>();
  const int64_t* classes = output[2].GetTensorData<int64_t>();
  for (size_t i = 0; i < output[1].GetTensorTypeAndShapeInfo().GetElementCount(); ++i, box += 4)
    std::printf("%d %.2f: %.1f %.1f %.1f %.1f\n", int(classes[i]), scores[i], box[0], box[1], box[2], box[3]);
}
